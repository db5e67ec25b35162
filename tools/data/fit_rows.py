"""Reads rows of recorded conversations; filters, pairs and splits them, before they are tokenised.

`slipstream.tools.data.conversation_rows` reads the shapes of conversations and of pairs. The rows of `slipstream
collect` and `replay export` have `messages`, a return and a group. Pairs are made of them: in each group, the row with
the highest return is preferred to the row with the lowest. KTO's label is a return of 1 or 0, and the rows of a prompt
are a group. Rows with `turn_labels` teach a process reward model.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.tool_call import with_tools
from slipstream.common.rows.row_source import BadRow, Row, is_hub, whole_rows
from slipstream.envhub.env_options import is_number
from slipstream.learner.credit.grpo import RETURN_RESOLUTION
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.data.conversation_rows import (
    COLUMNS,
    Conversation,
    conversation_of,
    from_fork,
    is_pair,
    label_of,
    labelled,
    pair_of,
    prompt_task,
    reason_to_leave_out,
    replies_alike,
)

if TYPE_CHECKING:
    from slipstream.learner.batch.examples import Goal

EQUAL_SIDES = "a pair with equal sides, thoughts aside"
OF_GOALS = {"min_return": ("sft", "prm"), "best_of_group": ("sft", "prm"), "beta": ("dpo",)}  # options of some alone

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One conversation to imitate, or two of which the first is preferred."""

    task: str  # the samples of one task are all trained on, or all held out
    group: str
    earned: float
    sides: tuple[Conversation, ...]


def read_samples(options: FitOptions, *, goal: "Goal") -> tuple[list[Sample], list[Sample], Counter[str]]:
    """The samples to train on, those held out, and how many rows are left out, by reason. Raises ConfigError."""
    for name, goals in OF_GOALS.items():
        if goal not in goals and getattr(options, name) != getattr(FitOptions(), name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"`{flag}` has no effect in `fit {goal}`, only in {' and '.join(goals)}; leave it out")
    path = options.data
    if not path or not (is_hub(path) or Path(path).is_file()):
        raise ConfigError(f"`--data` must name a file of conversations, got {options.data!r}; see docs/fitting.md")
    left_out: Counter[str] = Counter()
    try:
        rows = _rows_to_learn(path)
        if goal in ("sft", "prm"):
            samples = _conversations(rows, options, left_out, with_labels=goal == "prm")
        else:
            samples = _pairs(rows, left_out)
    except BadRow as error:
        raise ConfigError(f"`--data` {path}, {error}") from None
    unread = Counter(name for sample in samples for side in sample.sides for name in side.unread)
    if unread:
        fields = ", ".join(f"{name} ({number})" for name, number in unread.items())
        log.warning("fields of rows that are not read: %s; see docs/data.md", fields)
    held_out = [sample for sample in samples if held_out_place(sample.task) < options.held_out]
    trained = [sample for sample in samples if held_out_place(sample.task) >= options.held_out]
    if not trained:
        why = ", ".join(f"{number} {reason}" for reason, number in left_out.items() if number) or "the file is empty"
        raise ConfigError(f"`--data` {path} has no row to train on: {why}, {len(held_out)} held out")
    return trained, held_out, left_out


def _rows_to_learn(path: str) -> Iterator[tuple[int, Row]]:
    """The rows of a file. Raises BadRow for one of a held-out task."""
    for number, row in whole_rows(path):
        if str(row.get("task")).split("/")[-2:-1] == ["held_out"]:
            raise BadRow(
                f"row {number}: task {row['task']} is held out, and nothing learns from it; collect without --held-out"
            )
        yield number, row


@contextlib.contextmanager
def _naming(number: int) -> Iterator[None]:
    """Put the number of the row before the reason of a BadRow."""
    try:
        yield
    except BadRow as error:
        raise BadRow(f"row {number}: {error}") from None


def _conversations(
    rows: Iterable[tuple[int, Row]], options: FitOptions, left_out: Counter[str], *, with_labels: bool
) -> list[Sample]:
    """Samples of one side: every row once, or those with a return high enough, or the best of each group."""
    compared = bool(options.best_of_group) or options.min_return > -math.inf
    samples = []
    for number, row in rows:
        with _naming(number):
            if reason := reason_to_leave_out(row):
                left_out[reason] += 1
            elif (earned := return_of(row, needed=compared)) < options.min_return:
                left_out["return below --min-return"] += 1
            else:
                conversation = conversation_of(row)
                if with_labels:
                    conversation = labelled(row, conversation)
                samples.append(_sample(number, row, earned, (conversation,)))
    if options.best_of_group:  # before repeats go: the best row of a group may repeat that of another group
        samples = list(_best_of_groups(samples, options.best_of_group, left_out))
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
            if reason := reason_to_leave_out(row, labels=True):
                left_out[reason] += 1
            elif is_pair(row):
                pairs.append(_sample(number, row, 0.0, pair_of(row)))
            elif label_of(row) is None and all(row.get(column) is None for column in COLUMNS):
                raise BadRow(f"neither `chosen` and `rejected` nor `messages`, but {', '.join(row)}")
            else:
                singles.append(_sample(number, row, return_of(row, needed=True), (conversation_of(row),)))
    for group in _grouped(singles):
        best, worst = max(group, key=lambda each: each.earned), min(group, key=lambda each: each.earned)
        left_out["neither best nor worst of their group"] += max(0, len(group) - 2)
        if best.earned - worst.earned > RETURN_RESOLUTION:
            pairs.append(dataclasses.replace(best, sides=from_fork(best.sides[0], worst.sides[0])))
        else:
            left_out["in a group of equal returns"] += min(2, len(group))
    unlike = [pair for pair in pairs if not replies_alike(*pair.sides)]
    left_out[EQUAL_SIDES] += len(pairs) - len(unlike)
    return list(_without_repeats(unlike, left_out))


def _sample(number: int, row: Row, earned: float, sides: tuple[Conversation, ...]) -> Sample:
    """One sample. A row without a task is of that of its prompt; one without task, group and label is its own group.

    A null, which parquet has where only other rows have a column, is none.
    """
    named, group_id = row.get("task"), row.get("group_id")
    task = prompt_task(described(sides[0])) if named is None else str(named)
    group = task if named is not None or label_of(row) is not None else f"row {number}"
    return Sample(task=task, group=group if group_id is None else f"{task}/{group_id}", earned=earned, sides=sides)


def described(conversation: Conversation) -> Conversation:
    """The conversation with a description of its tools at the end of its system message.

    So a policy reads and writes text alone, whatever its chat template knows of tools.
    """
    if not (tools := json.loads(conversation.tools)):
        return conversation
    messages = with_tools(conversation.messages, tools)
    added = len(messages) - len(conversation.messages)
    return dataclasses.replace(
        conversation,
        messages=messages,
        learn_from=conversation.learn_from and conversation.learn_from + added,
        unlearnt=frozenset(index + added for index in conversation.unlearnt),
        labels=tuple((index + added, label) for index, label in conversation.labels),
        tools="[]",
    )


def return_of(row: Row, *, needed: bool) -> float:
    """The return of a row, or its label; 0 if it has none and none is `needed`. Raises BadRow."""
    earned = label_of(row) if row.get("return") is None else row["return"]
    if is_number(earned):
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
