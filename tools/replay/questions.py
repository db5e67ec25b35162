"""The questions of `slipstream replay`: the arguments of each, and the function that answers it."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name

from slipstream.common.config.config import Config
from slipstream.replay.records.ledger import STATES
from slipstream.tools.cli.verb_table import FORCE, Arguments


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"must be FIRST:LAST, as in 1:20, got {text!r}")
    return int(found[1]), int(found[2])


# Arguments of questions, each of which is one of the function too.
STREAM: Arguments = {
    "--stream": {"choices": ("train", "eval"), "default": "train", "help": "which groups (default: train)"}
}
JSON: Arguments = {"--json": {"action": "store_true", "dest": "as_json", "help": "print one JSON object per line"}}
LIMIT: Arguments = {"--limit": {"type": _count, "default": 50, "metavar": "N", "help": "list at most N (default: 50)"}}
STATE: Arguments = {"--state": {"choices": STATES, "help": "only groups in this state"}}
SELECTION: Arguments = {
    "--state": {"choices": STATES, "help": "only groups in Redis in this state (default: all groups)"},
    "--steps": {"type": _steps, "metavar": "A:B", "help": "only what steps A to B were trained on, from the archive"},
    "--min-reward": {"type": float, "metavar": "R", "help": "only trajectories with a return of R or more"},
}
REASON: Arguments = {
    "--reason": {"required": True, "metavar": "WHY", "help": "why it is set aside; `replay quarantined` lists it"}
}


@dataclass(frozen=True, slots=True)
class Question:
    function: str  # `module:name` in this folder, imported when the question is asked
    summary: str
    arguments: Arguments = field(default_factory=dict)
    operands: str = ""  # those in [brackets] are optional, "..." means one or more of the last


QUESTIONS = {
    "audit": Question(
        "audit_table:audit", "recount every group and trajectory, and report what contradicts the ledger"
    ),
    "repair": Question(
        "group_edits:repair",
        "make a damaged ledger agree with what is stored again; unusable records are removed",
        STREAM | JSON,
    ),
    "groups": Question("groups:groups", "list the groups in Redis", STREAM | JSON | STATE | LIMIT),
    "show": Question(
        "show:show", "show the members of a group, or one trajectory turn by turn", STREAM | JSON, "GROUP [MEMBER]"
    ),
    "quarantine": Question(
        "group_edits:quarantine",
        "take a group out of training, and keep it for inspection",
        STREAM | JSON | REASON,
        "GROUP",
    ),
    "requeue": Question(
        "group_edits:requeue",
        "queue groups again that are quarantined, ready, judging or leased; their trajectories are dropped",
        STREAM | JSON,
        "GROUP ...",
    ),
    "failures": Question(
        "failure_table:failures",
        "list the last attempts that failed because of an environment or the infrastructure",
        STREAM | JSON | LIMIT,
    ),
    "quarantined": Question(
        "failure_table:quarantined", "list the quarantined groups, with the reason and the actor", STREAM | JSON | LIMIT
    ),
    "export": Question(
        "trajectory_rows:export",
        "write trajectories to FILE.jsonl or FILE.parquet, with the columns that TRL reads",
        STREAM | SELECTION | FORCE,
        "FILE",
    ),
}


def add_questions(parser: argparse.ArgumentParser, add_settings: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add one parser per question to `parser`; each also takes what `add_settings` adds."""
    questions = parser.add_subparsers(
        dest="question", required=True, metavar="QUESTION", parser_class=argparse.ArgumentParser
    )
    for name, question in QUESTIONS.items():
        one = questions.add_parser(
            name,
            help=question.summary,
            description=question.summary,
            usage=f"{parser.prog} {name} {question.operands} [NAME] [options] [section.key=value ...]",
            epilog="`slipstream replay --help all` lists the settings",
        )
        add_settings(one)
        one.set_defaults(given=[one.add_argument(flag, **how).dest for flag, how in question.arguments.items()])


def take_operands(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Move the operands from `arguments.settings` to `numbers` or `path`. Exits with an error if they do not fit."""
    operands = QUESTIONS[arguments.question].operands
    words = operands.split()
    if not words:
        return
    fits = re.compile(r".*\.(jsonl|parquet)" if words == ["FILE"] else r"\d{1,18}")  # all else names the run
    found = [word for word in arguments.settings if fits.fullmatch(word)]
    arguments.settings = [word for word in arguments.settings if word not in found]
    num_needed = sum(word.isupper() and not word.startswith("[") for word in words)
    too_many = "..." not in words and len(found) > len(words)
    if len(found) < num_needed or too_many:
        what = "a .jsonl or .parquet file" if words == ["FILE"] else "numbers"
        parser.error(
            f"replay {arguments.question} takes {operands}, {what}, and the run's NAME, "
            f"got {' '.join([*found, *arguments.settings]) or 'nothing'}"
        )
    if words == ["FILE"]:
        arguments.path = Path(found[0])
        arguments.given.append("path")
    else:
        arguments.numbers = [int(word) for word in found]
        arguments.given.append("numbers")


def ask(config: Config, *, arguments: argparse.Namespace) -> int:
    """Answer the question in `arguments`; return the exit code."""
    answer = resolve_name(f"slipstream.tools.replay.{QUESTIONS[arguments.question].function}")
    code: int = answer(config, **{name: getattr(arguments, name) for name in arguments.given})
    return code
