"""`slipstream VERB [NAME | config.yaml ...] [a.b=c ...] [--option value ...]`: each process is one verb."""

import argparse
import contextlib
import errno
import json
import os
import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import yaml
from redis.exceptions import NoPermissionError

from slipstream.common.config.config import Config, dump_config, is_config, key_paths, load_config
from slipstream.common.config.suggestion import option_hint, verb_hint, word_hint
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import PASSWORD_VARIABLE, RedisUnreachable, without_password
from slipstream.common.process.printable import printable_block
from slipstream.common.process.run_dir import RunDir, find_run
from slipstream.common.transfer.encryption import load_key
from slipstream.replay.buffer.listing import NotRecorded
from slipstream.replay.fleet.fleet import UnknownRun
from slipstream.replay.server.redis_server import password_of
from slipstream.replay.server.redis_version import ServerError
from slipstream.tools.cli.verb_table import GROUPS, VERBS, called, summary_of
from slipstream.tools.run.child import EXIT_BAD_INPUT
from slipstream.tools.terminal.config_help import settings_topic
from slipstream.tools.terminal.options import add_options

WRONG_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # a retry cannot help
QUICKSTART = "conf/quickstart.yaml"
OF_A_RUN = ("env.", "model.")  # what a run learns, and by which model
ROWS = (".jsonl", ".parquet")  # what FILE ends with
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
        config.model.path = resolve_name("slipstream.tools.run.hub:local_model")(config.model.path)
    return called(arguments)(config)


def _drop_output() -> None:
    """Let the interpreter flush, at its end, what standard output does not take."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, with settings before, between and after the options. Exits after a help, or with an error."""
    name, words = _verb_in(sys.argv[1:] if argv is None else argv)
    verb, parser = VERBS[name], _parser(name)
    arguments, rest = parser.parse_known_args(words)
    if unknown := next((word for word in rest if word.startswith("-")), ""):
        known = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"no option {unknown}{option_hint(unknown, known, key_paths())}")
    arguments.settings += rest
    if verb.operands:
        _take_numbers(parser, arguments, verb.operands)
    if "path" in verb.arguments:  # settings and the name of the run may come before FILE
        words = [arguments.path, *arguments.settings]
        named = [word for word in words if not re.match(r"[\w.]+=", word)] or words  # a folder may be named lr=1e-6
        file = min(named, key=lambda word: (not word.endswith(ROWS), not Path(word).suffix))
        words.remove(file)
        arguments.path, arguments.settings = Path(file), words
    if verb.of_runs:
        arguments.runs = [word for word in arguments.settings if "=" not in word]
        arguments.settings = [word for word in arguments.settings if "=" in word]
    return arguments


def _take_numbers(parser: argparse.ArgumentParser, arguments: argparse.Namespace, operands: str) -> None:
    """Move the numbers from the settings to `numbers`. Exits with an error if they are not what `operands` says."""
    found = [word for word in arguments.settings if re.fullmatch(r"\d{1,18}", word)]  # all else names the run
    arguments.settings = [word for word in arguments.settings if word not in found]
    if not found or (len(found) > len(operands.split()) and "..." not in operands):
        given = " ".join([*found, *arguments.settings]) or "nothing"
        parser.error(f"{arguments.verb} takes {operands}, numbers, and the run's NAME, got {given}")
    arguments.numbers = [int(word) for word in found]


def _verb_in(words: list[str]) -> tuple[str, list[str]]:
    """The key in VERBS that `words` begin with, and what follows it. Exits after a help, or with an error."""
    name, *rest = words or [""]
    verbs = [verb for group in GROUPS.values() for verb in group]
    if name in ("", "-h", "--help"):
        if rest and rest[0] in verbs:
            return _verb_in([rest[0], *rest[1:], "--help"])
        print(settings_topic(rest[0], []) if rest else overview())
        sys.exit(0)
    if name in VERBS:
        return name, rest
    seconds = [verb.removeprefix(f"{name} ") for verb in VERBS if verb.startswith(f"{name} ")]
    if not seconds:
        _refuse(f"no verb `{name}`{verb_hint(name, verbs)}; `slipstream` lists all")
    what, *rest = rest or [""]
    if what in seconds:
        return f"{name} {what}", rest
    if what in ("-h", "--help"):
        print("\n".join(f"slipstream {name} {second}: {VERBS[f'{name} {second}'].summary}" for second in seconds))
        sys.exit(0)
    given = f"`{what}`{word_hint(what, seconds)}" if what else "nothing"
    _refuse(f"`slipstream {name}` takes one of {', '.join(seconds)}, got {given}")


def _refuse(message: str) -> NoReturn:
    print(printable_block(f"slipstream: {message}"), file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)


def overview() -> str:
    """Every verb in its group, on one screen."""
    rows = ["slipstream VERB [NAME | config.yaml] [section.key=value ...] [--help [TOPIC]]"]
    for group, verbs in GROUPS.items():
        rows += [f"{group if verb == next(iter(verbs)) else '':8}{verb:9}{what}" for verb, what in verbs.items()]
    return "\n".join([*rows, "VERB --help has its options, --help all the settings, --help optim one section"])


class _Help(argparse.Action):
    """`--help` of a verb, or `--help TOPIC` for its settings: all, a section or a key."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, topic: Any, option: str | None = None) -> None:
        read = VERBS[parser.get_default("verb")].settings
        print(settings_topic(topic, read) if topic else parser.format_help())
        parser.exit()


def _parser(name: str) -> argparse.ArgumentParser:
    """The parser of what follows the verb `name`."""
    verb = VERBS[name]
    read = list(dict.fromkeys(key.partition(".")[0] for key in verb.settings))
    parser = argparse.ArgumentParser(
        prog=f"slipstream {name}",
        usage=f"%(prog)s {verb.operands} [NAME] [options] [key=value ...]" if verb.operands else None,
        description=summary_of(name),
        epilog=f"settings of {', '.join(read)}: --help all, --help SECTION" if read else None,
        add_help=False,
    )
    what = "this help; or the settings of a section, or all"
    parser.add_argument("-h", "--help", action=_Help, nargs="?", metavar="TOPIC", help=what)
    parser.set_defaults(verb=name, resume=None, replay_archive=None, road="")
    given = [parser.add_argument(flag, **how).dest for flag, how in verb.arguments.items()]
    parser.set_defaults(given=[*given, *(["numbers"] if verb.operands else ["runs"] if verb.of_runs else [])])
    if verb.own is not None:
        add_options(parser, verb.own)
    named = "NAME" if verb.joins or verb.of_runs else "config.yaml"
    parser.add_argument(
        "settings",
        nargs="*",
        metavar=f"{named} | section.key=value",
        help=f"{'a run' if named == 'NAME' else 'YAML files that change defaults'}, and single settings; a later wins",
    )
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration, and exit")
    return parser


def load(arguments: argparse.Namespace) -> Config:
    """The configuration without its password, which is moved to an environment variable that children inherit."""
    verb = VERBS[arguments.verb]
    if verb.has_stages:
        split = resolve_name("slipstream.tools.road.road_file:split_road")
        arguments.road, arguments.settings = split(arguments.settings)
    words = [word for word in arguments.settings if "=" not in word]
    overrides = [word for word in arguments.settings if "=" in word]
    continued = arguments.resume or arguments.replay_archive
    if continued and (words or arguments.road):
        raise ConfigError(
            f"got {', '.join(words) or arguments.road} with --resume or --replay-archive, which use the configuration "
            "of an existing run; leave it out, and change single settings as key=value"
        )
    named = {key: _unquoted(value) for key, _, value in (override.partition("=") for override in overrides)}
    root = named.get("run.root", Config().run.root)
    found = find_run(continued, root) if continued else None
    if found:
        overrides = [_root_of(found, "" if arguments.replay_archive else named.get("run.name", "")), *overrides]
    if found and arguments.replay_archive:
        run = found.path.name
        overrides = [setting("run.rerun_of", run), setting("run.name", f"{run}-rerun"), "redis.url=''", *overrides]
    if verb.has_stages and words and not is_config(words[0]) and RunDir(root, words[0]).config.is_file():
        raise ConfigError(f"`{words[0]}` is a run; `slipstream up --resume {words[0]}` continues it")
    if found:
        words = [str(found.config)]
    elif verb.joins:
        words, of_run = _of_run(words, named, root, plays=verb.plays)
        overrides = [*of_run, *overrides]
    elif arguments.verb == "up" and not (words or arguments.road or any(key.startswith(OF_A_RUN) for key in named)):
        words = [QUICKSTART]  # the defaults alone teach nothing: their model earns no reward
    config = load_config(words[0] if words else None, overrides, presets=words[1:])
    config.redis.url = without_password(config.redis.url)
    own = password_of(RunDir(config.run.root, config.run.name).redis, config.redis.url)
    if own is not None:
        os.environ[PASSWORD_VARIABLE] = own
    if verb.moves_weights:
        load_key(config.weights.key_file)
    return config


def _of_run(words: list[str], named: dict[str, str], root: str, *, plays: bool) -> tuple[list[str], list[str]]:
    """The files and first settings of the run that `words` name, or `run.name`, for a verb about a run.

    The run may be on another host: then its name is enough beside `redis.url`. Raises ConfigError.
    """
    runs = [word for word in words if not is_config(word)]
    if not runs:
        here = RunDir(root, named.get("run.name", Config().run.name)).config
        if words or not here.is_file():
            return words, []
        return [str(here)], ["model.path=''"] if plays else []
    if len(words) > 1:
        raise ConfigError(f"got {', '.join(words)}; give the name of one run, or config files and run.name=NAME")
    if "redis.url" in named and "/" not in runs[0] and not RunDir(root, runs[0]).config.is_file():
        return [], [setting("run.name", runs[0])]
    run_dir = find_run(runs[0], root)
    first = _root_of(run_dir, named.get("run.name", ""))
    return [str(run_dir.config)], [first, *(["model.path=''"] if plays else [])]


def _root_of(run_dir: RunDir, given: str) -> str:
    """The setting `run.root` of a run that may have been moved. Raises ConfigError for one under another name.

    `given` is the setting `run.name`, by which a copy may be called what its folder is; empty if it is not set.
    """
    recorded, folder = load_config(str(run_dir.config), []).run.name, run_dir.path.name
    if given and given != folder:
        raise ConfigError(f"got the run {folder} and run.name={given}, another one; leave one of them out")
    if not given and recorded != folder:
        raise ConfigError(
            f"{run_dir.path} is a copy of the run {recorded!r}, or was renamed; name the folder {recorded}"
        )
    return setting("run.root", run_dir.path.parent)


def _unquoted(value: str) -> str:
    """The text that YAML reads in the `value` of a setting; another value, and what is no YAML, as it is."""
    with contextlib.suppress(yaml.YAMLError):
        read = yaml.safe_load(value)
        return read if isinstance(read, str) else value
    return value


def setting(key: str, value: object) -> str:
    """The setting of `key` to a text, which YAML reads as it is, whatever characters it has."""
    return f"{key}={json.dumps(str(value), ensure_ascii=False)}"


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
