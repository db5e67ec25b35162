"""The subcommands of `slipstream replay`: their arguments, and the functions that answer them."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from slipstream.common.config.config import Config
from slipstream.replay.records.ledger import STATES

STREAMS = ("train", "eval")

# The operands of each question: those in [brackets] are optional, "..." means one or more of the last.
OPERANDS = {
    "audit": "",
    "repair": "",
    "groups": "",
    "show": "GROUP [MEMBER]",
    "diff": "STEP [OTHER]",
    "quarantine": "GROUP",
    "requeue": "GROUP ...",
    "failures": "",
    "quarantined": "",
    "export": "FILE",
}
SUMMARIES = {
    "audit": "recount every group and trajectory, and report what contradicts the ledger",
    "repair": "make a damaged ledger agree with what is stored again; unusable records are removed",
    "groups": "list the groups in Redis",
    "show": "show the members of a group, or one trajectory turn by turn",
    "diff": "show what a step was trained on, and its best against its worst actions; or compare two steps",
    "quarantine": "take a group out of training, and keep it for inspection",
    "requeue": "queue groups again that are quarantined, ready, judging or leased; their trajectories are dropped",
    "failures": "list the last attempts that failed because of an environment or the infrastructure",
    "quarantined": "list the quarantined groups, with the reason and the actor",
    "export": "write trajectories to FILE.jsonl or FILE.parquet, with the columns that TRL reads",
}


def add_questions(parser: argparse.ArgumentParser, settings: argparse.ArgumentParser) -> None:
    """Add one parser per question to `parser`; each also takes the arguments of `settings`."""
    questions = parser.add_subparsers(
        dest="question", required=True, metavar="QUESTION", parser_class=argparse.ArgumentParser
    )
    for name, summary in SUMMARIES.items():
        one = questions.add_parser(
            name,
            help=summary,
            description=summary,
            parents=[settings],
            usage=f"{parser.prog} {name} {OPERANDS[name]} [NAME] [options] [section.key=value ...]",
            epilog="`slipstream replay --help all` lists the settings",
        )
        one.set_defaults(operands=[])
        if name not in ("audit", "diff"):
            one.add_argument("--stream", choices=STREAMS, default="train", help="which groups (default: train)")
        if name not in ("audit", "export"):
            one.add_argument("--json", action="store_true", help="print one JSON object per line")
        if name in _ADD_OPTIONS:
            _ADD_OPTIONS[name](one)


def take_operands(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Move the operands from `arguments.settings` to `arguments.operands`. Exits with an error if they do not fit."""
    words = OPERANDS[arguments.question].split()
    if not words:
        return
    fits = re.compile(r".*\.(jsonl|parquet)" if words == ["FILE"] else r"\d{1,18}")  # all else names the run
    given = [word for word in arguments.settings if fits.fullmatch(word)]
    arguments.settings = [word for word in arguments.settings if word not in given]
    num_needed = sum(word.isupper() and not word.startswith("[") for word in words)
    too_many = "..." not in words and len(given) > len(words)
    if len(given) < num_needed or too_many:
        what = "a .jsonl or .parquet file" if words == ["FILE"] else "numbers"
        parser.error(
            f"replay {arguments.question} takes {OPERANDS[arguments.question]}, {what}, and the run's NAME, "
            f"got {' '.join([*given, *arguments.settings]) or 'nothing'}"
        )
    arguments.operands = given


def ask(config: Config, *, arguments: argparse.Namespace) -> int:
    """Answer the question in `arguments`; return the exit code."""
    return _answer(arguments)(config)


def _answer(arguments: argparse.Namespace) -> Callable[[Config], int]:
    """The function that answers the question. Its modules are imported only now."""
    match arguments.question:
        case "audit":
            from slipstream.tools.replay.audit_table import audit

            return audit
        case "groups":
            return _groups(arguments)
        case "show":
            return _show(arguments)
        case "diff":
            return _diff(arguments)
        case "quarantine" | "requeue" | "repair":
            return _edit(arguments)
        case "failures" | "quarantined":
            return _failures(arguments)
        case _:
            return _export(arguments)


def _groups(arguments: argparse.Namespace) -> Callable[[Config], int]:
    from slipstream.tools.replay.groups import Wanted, groups

    wanted = Wanted(
        state=arguments.state,
        task=arguments.task,
        actor=arguments.actor,
        older_than_s=arguments.older_than,
        policy_version=arguments.version,
    )
    return lambda config: groups(
        config, wanted=wanted, limit=arguments.limit, stream=arguments.stream, as_json=arguments.json
    )


def _show(arguments: argparse.Namespace) -> Callable[[Config], int]:
    from slipstream.tools.replay.show import show

    group_id, *member = map(int, arguments.operands)
    return lambda config: show(
        config, group_id=group_id, member=member[0] if member else None, stream=arguments.stream, as_json=arguments.json
    )


def _diff(arguments: argparse.Namespace) -> Callable[[Config], int]:
    from slipstream.tools.replay.diff import compare, diff

    step, *other = map(int, arguments.operands)
    if other:
        return lambda config: compare(config, step=step, other=other[0], as_json=arguments.json)
    return lambda config: diff(config, step=step, num_diffs=arguments.diffs, as_json=arguments.json)


def _edit(arguments: argparse.Namespace) -> Callable[[Config], int]:
    from slipstream.tools.replay.group_edits import quarantine, repair, requeue

    if arguments.question == "repair":
        return lambda config: repair(config, stream=arguments.stream, as_json=arguments.json)
    group_ids, stream = [int(word) for word in arguments.operands], arguments.stream
    if arguments.question == "requeue":
        return lambda config: requeue(config, group_ids=group_ids, stream=stream, as_json=arguments.json)
    return lambda config: quarantine(
        config, group_id=group_ids[0], reason=arguments.reason, stream=stream, as_json=arguments.json
    )


def _failures(arguments: argparse.Namespace) -> Callable[[Config], int]:
    from slipstream.tools.replay.failure_table import failures, quarantined

    verb = failures if arguments.question == "failures" else quarantined
    return lambda config: verb(config, limit=arguments.limit, stream=arguments.stream, as_json=arguments.json)


def _export(arguments: argparse.Namespace) -> Callable[[Config], int]:
    from slipstream.tools.replay.trajectory_rows import Selection, export

    selection = Selection(state=arguments.state, steps=arguments.steps, min_return=arguments.min_reward)
    return lambda config: export(
        config,
        path=Path(arguments.operands[0]),
        selection=selection,
        stream=arguments.stream,
        force=arguments.force,
    )


def _add_group_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--state", choices=STATES, help="only groups in this state")
    one.add_argument(
        "--task", metavar="TASK", help="only groups of this task, split or env: shop/train/3, shop/train, shop"
    )
    one.add_argument("--actor", metavar="NAME", help="only groups that this actor leases, or made a member of")
    one.add_argument("--older-than", type=float, metavar="SECONDS", help="only groups longer than this in their state")
    one.add_argument("--version", type=int, metavar="V", help="only groups whose newest token has this policy version")
    _add_limit(one)


def _add_limit(one: argparse.ArgumentParser) -> None:
    one.add_argument("--limit", type=_count, default=50, metavar="N", help="list at most N (default: 50)")


def _add_export_options(one: argparse.ArgumentParser) -> None:
    which = one.add_mutually_exclusive_group()
    which.add_argument("--state", choices=STATES, help="only groups in Redis in this state (default: all groups)")
    which.add_argument(
        "--steps", type=_steps, metavar="A:B", help="only what steps A to B were trained on, from the archive"
    )
    one.add_argument("--min-reward", type=float, metavar="R", help="only trajectories with a return of R or more")
    one.add_argument("--force", action="store_true", help="overwrite FILE if it exists")


def _add_reason(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--reason", required=True, metavar="WHY", help="why it is quarantined; listed by `replay quarantined`"
    )


def _add_num_diffs(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--diffs",
        type=_count,
        default=3,
        metavar="N",
        help="compare the actions in the N groups with the most unequal returns (default: 3)",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"must be FIRST:LAST, as in 1:20, got {text!r}")
    return int(found[1]), int(found[2])


_ADD_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "groups": _add_group_options,
    "diff": _add_num_diffs,
    "quarantine": _add_reason,
    "failures": _add_limit,
    "quarantined": _add_limit,
    "export": _add_export_options,
}
