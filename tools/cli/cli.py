"""`slipstream VERB [config.yaml ...] [a.b=c ...] [--option value ...]`: the command line; each process is one verb."""

import argparse
import dataclasses
import errno
import os
import sys
from pathlib import Path
from typing import NoReturn

from redis.exceptions import NoPermissionError

from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import PASSWORD_VARIABLE, RedisUnreachable, without_password
from slipstream.common.process.printable import printable_block
from slipstream.common.process.run_dir import RunDir
from slipstream.common.transfer.encryption import load_key
from slipstream.replay.buffer.listing import NotRecorded
from slipstream.replay.fleet.fleet import UnknownRun
from slipstream.replay.server.redis_server import ServerError, password_of
from slipstream.tools.cli.verb_table import VERBS, Verb, called, placed, run_name
from slipstream.tools.run.child import EXIT_BAD_INPUT
from slipstream.tools.terminal.config_help import settings_help
from slipstream.tools.terminal.options import add_options

WRONG_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # a retry cannot help
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 failed, 2 bad input (a retry cannot help), 75 preempted, 130 Ctrl-C."""
    arguments = parsed(argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here, where a full disk is reported
        return code
    except (ConfigError, RedisUnreachable, ServerError, UnknownRun, NotRecorded, NoPermissionError) as error:
        print(printable_block(f"slipstream {arguments.verb}: {error}"), file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed the pipe
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is None and error.errno not in NO_ROOM:
            raise  # of no file that the user named, so the traceback is needed
        where = "standard output or a file" if error.filename is None else error.filename
        cure = "free space" if error.errno in NO_ROOM else "choose another path"
        print(printable_block(f"slipstream {arguments.verb}: {where}: {error.strerror}; {cure}"), file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return EXIT_BAD_INPUT if error.errno in WRONG_PATH else 1


def _run(arguments: argparse.Namespace) -> int:
    config = load(arguments)
    if arguments.print_config:
        print(dump_config(config), end="")
        return 0
    if VERBS[arguments.verb].loads_model:
        config.model.path = placed("slipstream.tools.run.hub:local_model")(config.model.path)
    return called(arguments)(config)


def _drop_output() -> None:
    """Let the interpreter flush, at its end, what standard output does not take."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, with settings before, between and after the options."""
    words = sys.argv[1:] if argv is None else argv
    parser = _parser(next((word for word in words if word in VERBS), None))
    arguments, rest = parser.parse_known_args(words)
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.settings += rest
    verb = VERBS[arguments.verb]
    if verb.asks:
        placed("slipstream.tools.replay.questions:take_operands")(parser, arguments)
    if verb.of_runs:
        arguments.runs = [word for word in arguments.settings if "=" not in word]
        arguments.settings = [word for word in arguments.settings if "=" in word]
    return arguments


class _Parser(argparse.ArgumentParser):
    """Appends settings to its help: every one, or those of a verb. They are read from the source only for the help."""

    verb = ""

    def format_help(self) -> str:
        sections = VERBS[self.verb].settings if self.verb else [section.name for section in dataclasses.fields(Config)]
        title = f"settings of `slipstream {self.verb}`" if self.verb else "all settings"
        more = "\n`slipstream --help` lists all settings\n" if self.verb else ""
        return f"{super().format_help()}\n{title} (section.key = default):\n{settings_help(sections)}\n{more}"


def _parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line. With `chosen`, only that verb's arguments are known: others import more."""
    parser = _Parser(prog="slipstream", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        is_known = chosen in (name, None)
        one = verbs.add_parser(
            name,
            help=verb.summary,
            description=verb.summary,
            parents=[_before_settings(verb), _settings()] if is_known and not verb.asks else [],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.verb = name
        if is_known:
            _add_own(one, verb)
    return parser


def _before_settings(verb: Verb) -> _Parser:
    """A parent parser with the arguments that come first."""
    operands = _Parser(add_help=False)
    if verb.adds:
        placed(verb.adds)(operands)
    for flag, how in verb.arguments.items():
        if not flag.startswith("-"):
            operands.add_argument(flag, **how)
    return operands


def _add_own(parser: _Parser, verb: Verb) -> None:
    """Add the options of `verb`, and its questions."""
    if verb.own is not None:
        add_options(parser, verb.own)
    if verb.asks:
        placed("slipstream.tools.replay.questions:add_questions")(parser, _settings())
    for flag, how in verb.arguments.items():
        if flag.startswith("-"):
            parser.add_argument(flag, **how)


def _settings() -> _Parser:
    """A parent parser with the arguments that every verb takes."""
    settings = _Parser(add_help=False)
    settings.set_defaults(replay_archive=None)
    settings.add_argument(
        "settings",
        nargs="*",
        metavar="config.yaml | section.key=value",
        help="YAML files that change defaults, then single settings; a later one wins",
    )
    settings.add_argument(
        "--resume", metavar="NAME", type=run_name, help="continue the run of this name with its configuration"
    )
    settings.add_argument("--print-config", action="store_true", help="print the whole configuration, and exit")
    return settings


def load(arguments: argparse.Namespace) -> Config:
    """The configuration without its password, which is moved to an environment variable that children inherit."""
    verb = VERBS[arguments.verb]
    if verb.has_stages:
        shared = placed("slipstream.tools.road.road_file:read_file")(arguments.road).settings
        arguments.settings = [*shared, *arguments.settings]
    files = [setting for setting in arguments.settings if "=" not in setting]
    overrides = [setting for setting in arguments.settings if "=" in setting]
    if (files or verb.has_stages) and (arguments.resume or arguments.replay_archive):
        raise ConfigError(
            f"got the config file {', '.join(files) or arguments.road} with --resume or --replay-archive, which use "
            "the configuration of an existing run; leave the file out, and change single settings as key=value"
        )
    if arguments.resume and arguments.replay_archive:
        raise ConfigError("got both --resume, which continues a run, and --replay-archive, which begins one; give one")
    named = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    root = named.get("run.root", Config().run.root)
    if arguments.resume:
        files = [str(_config_of(root, arguments.resume))]
    elif arguments.replay_archive:
        run = arguments.replay_archive
        files = [str(_config_of(root, run))]
        overrides = [f"run.rerun_of='{run}'", f"run.name='{run}-rerun'", "redis.url=''", *overrides]
    elif verb.joins and not files:
        there = RunDir(root, named.get("run.name", Config().run.name)).config
        if there.is_file():
            files = [str(there)]
            overrides = ["model.path=''", *overrides] if verb.plays else overrides
    config = load_config(files[0] if files else None, overrides, presets=files[1:])
    config.redis.url = without_password(config.redis.url)
    own = password_of(RunDir(config.run.root, config.run.name).redis, config.redis.url)
    if own is not None:
        os.environ[PASSWORD_VARIABLE] = own
    if verb.moves_weights:
        load_key(config.weights.key_file)
    return config


def _config_of(root: str, name: str) -> Path:
    """The configuration file of the run `name`. If it does not exist, raises ConfigError with those that do."""
    path = RunDir(root, name).config
    if not path.is_file():
        existing = sorted(other.parent.name for other in Path(root).glob("*/config.yaml"))
        raise ConfigError(f"no run {name!r} under {root}/; existing runs: {', '.join(existing) or 'none'}")
    return path


def _end(code: int) -> NoReturn:
    """End the process. One of several ranks skips the shutdown of the interpreter: threads of PyTorch's gloo sometimes
    abort in it (2 of 48 processes that had only joined, summed and left). The work is done by then, but the exit code
    would report a failure."""
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _end(main())
