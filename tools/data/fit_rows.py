"""Reads rows of recorded conversations; filters, pairs and splits them, before they are tokenised.

`slipstream.tools.data.conversation_rows` reads the shapes of conversations. Pairs are rows of TRL's format, `chosen`
and `rejected` with or without `prompt` (https://huggingface.co/docs/trl/dataset_formats). The rows of `slipstream
collect` and `replay export` have `messages`, a return and a group. Pairs are made of them: in each group, the row with
the highest return is preferred to the row with the lowest. Rows with `turn_labels` teach a process reward model.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.message import Message
from slipstream.common.records.tool_call import described_tools
from slipstream.learner.credit.grpo import RETURN_RESOLUTION
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.data.conversation_rows import (
    COLUMNS,
    BadRow,
    Conversation,
    Row,
    conversation_of,
    labelled,
    prompted,
    read_lines,
)

if TYPE_CHECKING:
    from slipstream.learner.batch.examples import Goal

UNREAD = "without messages (see `fidelity`)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One conversation to imitate, or two of which the first is preferred."""

    task: str  # the samples of one task are all trained on, or all held out
    group: str
    earned: float
    sides: tuple[Conversation, ...]


def read_samples(options: FitOptions, *, goal: "Goal") -> tuple[list[Sample], list[Sample], Counter[str]]:
    """Return the samples to train on, the samples held out, and the number of rows left out, by reason.

    Raises ConfigError with the line of the first bad row.
    """
    path = Path(options.data)
    if not options.data or not path.is_file():
        raise ConfigError(f"`--data` must name a file of conversations, got {options.data!r}; see docs/fitting.md")
    left_out: Counter[str] = Counter()
    try:
        rows = _numbered_rows(path)
        match goal:
            case "sft":
                samples = _conversations(rows, options, left_out)
            case "prm":
                samples = _labelled(rows, options, left_out)
            case _:
                samples = _pairs(rows, left_out)
    except BadRow as error:
        raise ConfigError(f"`--data` {path}, {error}") from None
    held_out = [sample for sample in samples if held_out_place(sample.task) < options.held_out]
    trained = [sample for sample in samples if held_out_place(sample.task) >= options.held_out]
    if not trained:
        why = ", ".join(f"{number} {reason}" for reason, number in left_out.items() if number) or "the file is empty"
        raise ConfigError(f"`--data` {path} has no row to train on: {why}, {len(held_out)} held out")
    return trained, held_out, left_out


def _numbered_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Every row with its number. Raises BadRow for the first that cannot be read."""
    for line in read_lines(path):
        if line.fault:
            raise BadRow(f"line {line.number} {line.fault}")
        yield line.number, line.row


@contextlib.contextmanager
def _naming(number: int) -> Iterator[None]:
    """Put the number of the row before the reason of a BadRow."""
    try:
        yield
    except BadRow as error:
        raise BadRow(f"row {number}: {error}") from None


def _conversations(rows: Iterable[tuple[int, Row]], options: FitOptions, left_out: Counter[str]) -> list[Sample]:
    """Samples to imitate: every row once, or those with a return high enough, or the best of each group."""
    compared = bool(options.best_of_group) or options.min_return > -math.inf
    samples = []
    for number, row in rows:
        with _naming(number):
            if "messages" in row and row["messages"] is None:
                left_out[UNREAD] += 1
            elif (earned := return_of(row, needed=compared)) < options.min_return:
                left_out["return below --min-return"] += 1
            else:
                samples.append(_sample(number, row, earned, (conversation_of(row),)))
    if options.best_of_group:  # before repeats go: the best row of a group may repeat that of another group
        samples = list(_best_of_groups(samples, options.best_of_group, left_out))
    return list(_without_repeats(samples, left_out))


def _labelled(rows: Iterable[tuple[int, Row]], options: FitOptions, left_out: Counter[str]) -> list[Sample]:
    """Samples of turns with labels."""
    samples = []
    for number, row in rows:
        with _naming(number):
            if "messages" in row and row["messages"] is None:
                left_out[UNREAD] += 1
            else:
                conversation = labelled(row, conversation_of(row), hard=options.hard)
                samples.append(_sample(number, row, 0.0, (conversation,)))
    return list(_without_repeats(samples, left_out))


def _best_of_groups(samples: Sequence[Sample], number: int, left_out: Counter[str]) -> Iterator[Sample]:
    for group in _grouped(samples):
        best_first = sorted(group, key=lambda sample: -sample.earned)  # stable: equals stay in order
        distinct = list(_without_repeats(best_first, left_out))
        yield from distinct[:number]
        left_out["not among the best of their group"] += max(0, len(distinct) - number)


def _grouped(samples: Iterable[Sample]) -> Iterable[list[Sample]]:
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    return groups.values()


def _pairs(rows: Iterable[tuple[int, Row]], left_out: Counter[str]) -> list[Sample]:
    """Samples of two sides: rows that are pairs, and the best and the worst of each group of other rows."""
    pairs, singles = [], []
    for number, row in rows:
        with _naming(number):
            if "chosen" in row:
                pairs.append(_sample(number, row, 0.0, _sides(row)))
            elif not any(column in row for column in COLUMNS):
                raise BadRow(f"neither `chosen` and `rejected` nor `messages`, but {', '.join(row)}")
            elif "messages" in row and row["messages"] is None:
                left_out[UNREAD] += 1
            else:
                singles.append(_sample(number, row, return_of(row, needed=True), (conversation_of(row),)))
    for group in _grouped(singles):
        best, worst = max(group, key=lambda each: each.earned), min(group, key=lambda each: each.earned)
        left_out["neither best nor worst of their group"] += max(0, len(group) - 2)
        if best.earned - worst.earned > RETURN_RESOLUTION:
            pairs.append(dataclasses.replace(best, sides=_from_fork(best.sides[0], worst.sides[0])))
        else:
            left_out["in a group of equal returns"] += min(2, len(group))
    return list(_without_repeats(pairs, left_out))


def _sample(number: int, row: Row, earned: float, sides: tuple[Conversation, ...]) -> Sample:
    """One sample. A row without a group is a group of its own; a row without a task is a task of its own.

    A null, which parquet has where only other rows have a column, is none.
    """
    task, group_id = row.get("task"), row.get("group_id")
    own = f"row {number}" if task is None else str(task)
    group = own if group_id is None else str(group_id) if task is None else f"{own}/{group_id}"
    return Sample(task=group if task is None else own, group=group, earned=earned, sides=sides)


def _sides(row: Row) -> tuple[Conversation, ...]:
    chosen, rejected = prompted(row, "chosen"), prompted(row, "rejected")
    return (chosen, rejected) if "prompt" in row else _from_fork(chosen, rejected)


def _from_fork(chosen: Conversation, rejected: Conversation) -> tuple[Conversation, ...]:
    """Two conversations, learnt from where they begin to differ: what is the same teaches no preference."""
    both = chosen.messages, rejected.messages
    fork = next(
        (place for place, (one, other) in enumerate(zip(*both, strict=False)) if one != other), min(map(len, both))
    )
    return tuple(dataclasses.replace(side, learn_from=fork) for side in (chosen, rejected))


def described(conversation: Conversation) -> Conversation:
    """The conversation with a description of its tools at the end of its system message.

    So a policy reads and writes text alone, whatever its chat template knows of tools.
    """
    if not (tools := json.loads(conversation.tools)):
        return conversation
    messages, text = conversation.messages, described_tools(tools)
    if messages[0].role == "system":
        text, messages, added = f"{messages[0].content}\n\n{text}", messages[1:], 0
    else:
        added = 1
    return dataclasses.replace(
        conversation,
        messages=(Message("system", text), *messages),
        learn_from=conversation.learn_from and conversation.learn_from + added,
        unlearnt=frozenset(index + added for index in conversation.unlearnt),
        labels=tuple((index + added, label) for index, label in conversation.labels),
        tools="[]",
    )


def return_of(row: Row, *, needed: bool) -> float:
    """The return of a row; 0 if it has none and none is `needed`. Raises BadRow."""
    earned = row.get("return")
    if isinstance(earned, int | float) and not isinstance(earned, bool) and math.isfinite(earned):
        return float(earned)
    if needed:
        raise BadRow(f"`return` must be a number, got {earned!r:.80}; rows are compared by their return")
    return 0.0


def _without_repeats(samples: Sequence[Sample], left_out: Counter[str]) -> Iterator[Sample]:
    seen = set[tuple[Conversation, ...]]()
    for sample in samples:
        if sample.sides in seen:
            left_out["identical to another row"] += 1
        else:
            seen.add(sample.sides)
            yield sample


def held_out_place(task: str) -> float:
    """Hash a task into [0, 1). It depends on nothing else, so a task is held out in every run or in none."""
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:6]) / (1 << 48)
