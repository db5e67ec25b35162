"""The questions of `slipstream replay`: what each takes, and who answers it."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from common.config import Config
from replay.ledger import STATES

STREAMS = ("train", "eval")
CONFIG_NAMES = (".yaml", ".yml")

# What stands between a question and its settings: [a word] may be left out, "..." means one or more of the last.
OPERANDS = {
    "audit": "",
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
    "audit": "recount every group and trajectory, and say what contradicts the books",
    "groups": "list the groups that Redis holds",
    "show": "the members of a group, or one trajectory turn by turn",
    "diff": "what a step was trained on, and how its best actions differ from its worst; or two steps side by side",
    "quarantine": "set a group aside, so that nobody trains on it",
    "requeue": "let groups that are quarantined, ready or leased begin anew; what they have stored is dropped",
    "failures": "the last attempts that failed by no doing of the policy's",
    "quarantined": "the groups that are set aside, why, and who sent them",
    "export": "write trajectories to FILE.jsonl or FILE.parquet, with the columns that TRL reads",
}


def add_questions(parser: argparse.ArgumentParser, settings: argparse.ArgumentParser) -> None:
    """Give `parser` one parser a question; each takes what `settings` takes."""
    questions = parser.add_subparsers(
        dest="question", required=True, metavar="QUESTION", parser_class=argparse.ArgumentParser
    )  # fmt: skip
    for name, summary in SUMMARIES.items():
        one = questions.add_parser(
            name, help=summary, description=summary, parents=[settings],
            usage=f"{parser.prog} {name} {OPERANDS[name]} [options] [config.yaml | section.key=value ...]",
            epilog="`slipstream up --help` lists every configuration key",
        )  # fmt: skip
        one.set_defaults(operands=[])
        if name not in ("audit", "diff"):
            one.add_argument("--stream", choices=STREAMS, default="train", help="which groups (default: train)")
        if name not in ("audit", "export"):
            one.add_argument("--json", action="store_true", help="one JSON object a line")
        if name in _ADD_OPTIONS:
            _ADD_OPTIONS[name](one)


def take_operands(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Move what is no setting from `arguments.settings` to `arguments.operands`. Ends the program on a wrong number."""
    words = OPERANDS[arguments.question].split()
    if not words:
        return
    given = [word for word in arguments.settings if "=" not in word and not word.endswith(CONFIG_NAMES)]
    arguments.settings = [word for word in arguments.settings if word not in given]
    num_needed = sum(word.isupper() and not word.startswith("[") for word in words)
    too_many = "..." not in words and len(given) > len(words)
    if len(given) < num_needed or too_many:
        parser.error(
            f"replay {arguments.question} takes {OPERANDS[arguments.question]}, got {' '.join(given) or 'none'}"
        )
    if words != ["FILE"]:
        for word in given:
            if not re.fullmatch(r"\d{1,18}", word):
                parser.error(f"replay {arguments.question} takes numbers as {' '.join(words)}, got {word!r}")
    arguments.operands = given


def answer(arguments: argparse.Namespace) -> Callable[[Config], int]:
    """What answers the question. It imports what it needs only now."""
    match arguments.question:
        case "audit":
            from tools.replay.audit import audit

            return audit
        case "groups":
            return _groups(arguments)
        case "show":
            return _show(arguments)
        case "diff":
            return _diff(arguments)
        case "quarantine" | "requeue":
            return _edit(arguments)
        case "failures" | "quarantined":
            return _failures(arguments)
        case _:
            return _export(arguments)


def _groups(arguments: argparse.Namespace) -> Callable[[Config], int]:
    from tools.replay.groups import Wanted, groups

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
    from tools.replay.show import show

    group_id, *member = map(int, arguments.operands)
    return lambda config: show(
        config, group_id=group_id, member=member[0] if member else None, stream=arguments.stream, as_json=arguments.json
    )


def _diff(arguments: argparse.Namespace) -> Callable[[Config], int]:
    from tools.replay.diff import compare, diff

    step, *other = map(int, arguments.operands)
    if other:
        return lambda config: compare(config, step=step, other=other[0], as_json=arguments.json)
    return lambda config: diff(config, step=step, num_diffs=arguments.diffs, as_json=arguments.json)


def _edit(arguments: argparse.Namespace) -> Callable[[Config], int]:
    from tools.replay.edit import quarantine, requeue

    group_ids, stream = [int(word) for word in arguments.operands], arguments.stream
    if arguments.question == "requeue":
        return lambda config: requeue(config, group_ids=group_ids, stream=stream, as_json=arguments.json)
    return lambda config: quarantine(
        config, group_id=group_ids[0], reason=arguments.reason, stream=stream, as_json=arguments.json
    )


def _failures(arguments: argparse.Namespace) -> Callable[[Config], int]:
    from tools.replay.failures import failures, quarantined

    verb = failures if arguments.question == "failures" else quarantined
    return lambda config: verb(config, limit=arguments.limit, stream=arguments.stream, as_json=arguments.json)


def _export(arguments: argparse.Namespace) -> Callable[[Config], int]:
    from tools.replay.export import Selection, export

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
    one.add_argument("--task", metavar="TASK", help="only of this task, or of these: shop/train/3, shop/train, shop")
    one.add_argument("--actor", metavar="NAME", help="only groups that this actor leases or has made a member of")
    one.add_argument("--older-than", type=float, metavar="SECONDS", help="only groups in their state for longer")
    one.add_argument("--version", type=int, metavar="V", help="only groups whose oldest token is of this version")
    _add_limit(one)


def _add_limit(one: argparse.ArgumentParser) -> None:
    one.add_argument("--limit", type=_count, default=50, metavar="N", help="list at most so many (default: 50)")


def _add_export_options(one: argparse.ArgumentParser) -> None:
    which = one.add_mutually_exclusive_group()
    which.add_argument("--state", choices=STATES, help="groups that Redis holds in this state (default: in any)")
    which.add_argument(
        "--steps", type=_steps, metavar="A:B", help="what steps A to B were trained on, from the archive"
    )
    one.add_argument("--min-reward", type=float, metavar="R", help="only trajectories with a return of R or more")
    one.add_argument("--force", action="store_true", help="write over FILE if it is there")


def _add_reason(one: argparse.ArgumentParser) -> None:
    one.add_argument("--reason", required=True, metavar="WHY", help="what is wrong with it, for people")


def _add_num_diffs(one: argparse.ArgumentParser) -> None:
    one.add_argument("--diffs", type=_count, default=3, metavar="N",
                     help="show how actions differ in the N groups of most unequal returns (default: 3)")  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, got {text!r}")
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
