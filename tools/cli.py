"""`slipstream VERB [config.yaml] [section.key=value ...]`: one thin verb per process."""

import argparse
import functools
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from redis.exceptions import NoPermissionError

from common.config import Config, dump_config, key_paths, load_config
from common.config_error import ConfigError
from common.connection import PASSWORD_VARIABLE, RedisUnreachable, without_password
from common.curve import load_key
from common.run_dir import RunDir
from replay.fleet import UnknownRun
from replay.listing import NotRecorded
from replay.server import ServerError, password_of
from tools import drill
from tools.launch import launch
from tools.launch import scale
from tools.child import EXIT_BAD_INPUT
from tools.replay.questions import add_questions, answer, take_operands

# Verbs about a run that began before, perhaps in another process: without a YAML its own configuration is theirs.
JOINING = ("learner", "actors", "relay", "top", "scale", "replay", "eval", "collect")
FIXED_POLICY = ("eval", "collect")  # verbs that play with what a run has trained, not with what it began with
MOVING_WEIGHTS = ("up", "learner", "actors", "relay")

# Verbs import what they need when they are called: `slipstream top` must not wait seconds for torch.
VERBS = {
    "up": "start Redis, a learner, actors and TensorBoard on this machine, and watch them",
    "learner": "train; one process, or one per rank under torchrun when learner.ranks > 1",
    "actors": "start actors.count actors that roll out episodes for a run",
    "relay": "keep a run's newest weights for actors to pull, so that the publisher sends one copy",
    "top": "watch a run in the terminal",
    "scale": "have a host keep up as many actors as are advised, or as told",
    "drill": "a run on this machine under one fault after another, and what was lost: nothing",
    "launch": "start a run on Kubernetes, Slurm, SkyPilot or Ray",
    "replay": "look into the buffer: its groups, trajectories, what was trained; audit, set aside, export",
    "key": "make the key that weights travel under where the network is not trusted, at weights.key_file",
    "acl": "print users for a shared Redis server, by role: `slipstream acl run.name=NAME | redis-cli`",
    "sft": "imitate recorded conversations, those that earned enough: fit.data, from model.path",
    "dpo": "learn from pairs of conversations which is preferred (DPO): fit.data, from model.path",
    "reward": "fit a reward model to such pairs: fit.data, from model.path",
    "eval": "measure success on held-out tasks, of a run's trained model or of model.path",
    "collect": "play train tasks with a run's trained model or model.path, and write the trajectories to FILE",
    "envs": "serve environments to actors on other hosts: `slipstream envs serve`",
    "doctor": "check this machine: packages, Redis, memory, shared memory",
}


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 failed, 2 bad input or no use in another try, 75 told to leave, 130 Ctrl-C."""
    arguments = _parsed(argv)
    # An environment of the user's own may lie in this folder, as it may for the processes that are started from here.
    sys.path.insert(0, str(Path.cwd()))
    try:
        config = _load(arguments)
        if arguments.print_config:
            print(dump_config(config), end="")
            return 0
        return _verb(arguments)(config)
    except (ConfigError, RedisUnreachable, ServerError, UnknownRun, NotRecorded, NoPermissionError) as error:
        print(f"slipstream {arguments.verb}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output, as `head` does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parsed(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, with settings before, between and after the options."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.settings += rest
    if arguments.verb == "replay":
        take_operands(parser, arguments)
    return arguments


class _Parser(argparse.ArgumentParser):
    """Ends its help with every configuration key. They are read from the source, so only when somebody asks."""

    def format_help(self) -> str:
        return f"{super().format_help()}\n{_config_help()}\n"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slipstream", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, summary in VERBS.items():
        one = verbs.add_parser(
            verb, help=summary, description=summary, parents=_parents(verb),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        if verb == "replay":
            add_questions(one, _settings())
        if verb == "learner":
            one.add_argument("--replay-archive", metavar="RUN", help="train again on what this run was trained on, by "
                             "its own config, without actors and Redis; run.name is RUN-rerun by default")  # fmt: skip
        if verb == "drill":
            drill.add_options(one)
        if verb == "scale":
            scale.add_options(one)
        if verb == "collect":
            one.add_argument("--force", action="store_true", help="write over FILE if it is there")
        if verb == "up":
            one.add_argument("--dry-run", action="store_true", help="print what would be started and stop")
    return parser


def _parents(verb: str) -> list[_Parser]:
    """Whose arguments come before a verb's own."""
    if verb == "replay":
        return []
    operand = _Parser(add_help=False)
    if verb == "launch":
        launch.add_options(operand)
    if verb == "collect":
        operand.add_argument("file", type=Path, metavar="FILE", help="the file of rows, .jsonl or .parquet")
    if verb == "envs":
        operand.add_argument("service", choices=("serve",), help="what to do with them")
    return [operand, _settings()]


def _settings() -> _Parser:
    """What every verb takes, to be a parent of its parser."""
    settings = _Parser(add_help=False)
    settings.set_defaults(replay_archive=None)
    settings.add_argument("settings", nargs="*", metavar="config.yaml | section.key=value",
                          help="YAML files of differences, each over those before it, then overrides")  # fmt: skip
    settings.add_argument("--resume", metavar="NAME", help="go on with the run of this name, with its own config")
    settings.add_argument("--print-config", action="store_true", help="print the whole configuration and stop")
    return settings


def _load(arguments: argparse.Namespace) -> Config:
    """The configuration, without any password in it: that goes to the environment, for children to find."""
    files = [setting for setting in arguments.settings if "=" not in setting]
    overrides = [setting for setting in arguments.settings if "=" in setting]
    if files and (arguments.resume or arguments.replay_archive):
        raise ConfigError(
            f"config files, or --resume or --replay-archive with the run's own, not both; got {', '.join(files)}"
        )
    if arguments.resume and arguments.replay_archive:
        raise ConfigError("--resume goes on with a run, --replay-archive begins one; give one of them")
    named = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    root = named.get("run.root", Config().run.root)
    if arguments.resume:
        files = [str(_config_of(root, arguments.resume))]
    elif arguments.replay_archive:
        run = arguments.replay_archive
        files = [str(_config_of(root, run))]
        overrides = [f"run.rerun_of='{run}'", f"run.name='{run}-rerun'", "redis.url=''", *overrides]
    elif arguments.verb in JOINING and not files:
        there = RunDir(root, named.get("run.name", Config().run.name)).config
        if there.is_file():
            files = [str(there)]
            overrides = ["model.path=''", *overrides] if arguments.verb in FIXED_POLICY else overrides
    config = load_config(files[0] if files else None, overrides, presets=files[1:])
    config.redis.url = without_password(config.redis.url)
    own = password_of(RunDir(config.run.root, config.run.name).redis, config.redis.url)
    if own is not None:
        os.environ[PASSWORD_VARIABLE] = own
    if arguments.verb in MOVING_WEIGHTS:
        load_key(config.weights.key_file)
    return config


def _config_of(root: str, name: str) -> Path:
    """The configuration of a run that exists. Raises ConfigError with those that do."""
    path = RunDir(root, name).config
    if not path.is_file():
        there = sorted(other.parent.name for other in Path(root).glob("*/config.yaml"))
        raise ConfigError(f"no run {name!r} under {root}/; there are: {', '.join(there) or 'none'}")
    return path


def _verb(arguments: argparse.Namespace) -> Callable[[Config], int]:
    match arguments.verb:
        case "up":
            from tools.up import dry_run, up

            if arguments.dry_run:
                return dry_run
            return lambda config: up(config, resume=bool(arguments.resume))
        case "learner":
            from tools.rerun import rerun
            from tools.train import train

            return lambda config: rerun(config) if config.run.rerun_of else train(config)
        case "actors":
            from tools.actor_host import host_actors

            return host_actors
        case "relay":
            from actors.relay import relay
            from tools.check_input import check_host

            def checked(config: Config) -> int:
                check_host(config.weights.host)
                return relay(config)

            return checked
        case "key":
            from tools.key import make_key

            return make_key
        case "top":
            from tools.top import top

            return top
        case "scale":
            return lambda config: scale.scale(
                config, to=arguments.to, host=arguments.host, on=arguments.on, dry_run=arguments.dry_run
            )
        case "drill":
            return lambda config: drill.drill(config, faults=arguments.fault or list(drill.FAULTS))
        case "launch":
            return lambda config: launch.launch(config, engine=arguments.engine, dry_run=arguments.dry_run)
        case "replay":
            return answer(arguments)
        case "acl":
            from tools.acl import acl

            return acl
        case "sft" | "dpo" | "reward" as goal:
            from tools.fit import fit_model

            return lambda config: fit_model(config, goal=goal)
        case "eval":
            from tools.evaluate import evaluate

            return evaluate
        case "collect":
            from tools.collect import collect

            return lambda config: collect(config, path=arguments.file, force=arguments.force)
        case "envs":
            from tools.serve_envs import serve_envs

            return serve_envs
        case _:
            from tools.doctor import doctor

            return doctor


def _config_help() -> str:
    """Every key with its default and the comment beside it, read from the dataclasses' source."""
    lines = ["configuration keys (section.key = default):"]
    for path in key_paths():
        value: object = Config()
        for name in path.split("."):
            value = getattr(value, name)
        lines += textwrap.wrap(
            f"{path} = {value!r}  {_comment(path)}", 110, initial_indent="  ", subsequent_indent="      "
        )
    return "\n".join(lines)


def _comment(path: str) -> str:
    """The comment of a key inside its own section's class, as two sections may share a name."""
    section: type = Config
    for name in path.split(".")[:-1]:
        section = type(getattr(section(), name))
    found = re.search(
        rf"^    {path.rsplit('.', 1)[-1]}: [^\n]*?  # (.+)$", _source(section), re.MULTILINE
    )  # fmt: skip
    return found.group(1) if found else ""


@functools.cache
def _source(section: type) -> str:
    return inspect.getsource(section)


if __name__ == "__main__":
    sys.exit(main())
