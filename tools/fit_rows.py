"""Reads rows of recorded conversations; filters, pairs and splits them, before they are tokenised.

Rows have TRL's conversational formats (https://huggingface.co/docs/trl/dataset_formats): `messages`; `prompt` and
`completion`; `chosen` and `rejected`, with or without `prompt`. The rows of `slipstream collect` and `replay export`
have `messages`, a return and a group. Pairs are made of them: in each group, the row with the highest return is
preferred to the row with the lowest.
"""

import dataclasses
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config_error import ConfigError
from common.message import Message
from learner.fit_options import FitOptions

UNREAD = "without messages (see `fidelity`)"
ROLES = ("system", "user", "assistant", "tool")
Row = dict[str, Any]


class BadRow(ValueError):
    """A row in none of the known formats; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages. Those of the assistant are learnt from, beginning with index `learn_from`."""

    messages: tuple[Message, ...]
    learn_from: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One conversation to imitate, or two of which the first is preferred."""

    task: str  # the samples of one task are all trained on, or all held out
    group: str
    earned: float
    sides: tuple[Conversation, ...]


def read_samples(options: FitOptions, *, pairs: bool) -> tuple[list[Sample], list[Sample], Counter[str]]:
    """Return the samples to train on, the samples held out, and the number of rows left out, by reason.

    Raises ConfigError with the line of the first bad row.
    """
    path = Path(options.data)
    if not options.data or not path.is_file():
        raise ConfigError(f"`--data` must name a file of conversations, got {options.data!r}; see docs/fitting.md")
    left_out: Counter[str] = Counter()
    numbered = enumerate(_rows(path), start=1)
    try:
        samples = _pairs(numbered, left_out) if pairs else _conversations(numbered, options, left_out)
    except BadRow as error:
        raise ConfigError(f"`--data` {path}, row {error}") from None
    held_out = [sample for sample in samples if _place(sample.task) < options.held_out]
    trained = [sample for sample in samples if _place(sample.task) >= options.held_out]
    if not trained:
        why = ", ".join(f"{number} {reason}" for reason, number in left_out.items() if number) or "the file is empty"
        raise ConfigError(f"`--data` {path} has no row to train on: {why}, {len(held_out)} held out")
    return trained, held_out, left_out


def _rows(path: Path) -> Iterator[Row]:
    match path.suffix:
        case ".jsonl":
            with path.open() as file:
                for number, line in enumerate(file, start=1):
                    yield _parsed(path, number, line)
        case ".parquet":
            import pyarrow.parquet as pq  # only .parquet files need pyarrow

            for batch in pq.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
        case _:
            raise ConfigError(f"`--data` {path}: the name must end in .jsonl or .parquet")


def _parsed(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"`--data` {path}, line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"`--data` {path}, line {number} must be a JSON object, got a {type(row).__name__}")
    return row


def _conversations(rows: Iterable[tuple[int, Row]], options: FitOptions, left_out: Counter[str]) -> list[Sample]:
    """Samples to imitate: every row once, or those with a return high enough, or the best of each group."""
    compared = bool(options.best_of_group) or options.min_return > -math.inf
    samples = []
    for number, row in rows:
        if "messages" in row and row["messages"] is None:
            left_out[UNREAD] += 1
        elif (earned := _return(number, row, needed=compared)) < options.min_return:
            left_out["return below --min-return"] += 1
        else:
            samples.append(_sample(number, row, earned, (_conversation(number, row),)))
    once = list(_without_repeats(samples, left_out))
    return list(_best_of_groups(once, options.best_of_group, left_out)) if options.best_of_group else once


def _best_of_groups(samples: Sequence[Sample], number: int, left_out: Counter[str]) -> Iterator[Sample]:
    for group in _grouped(samples):
        yield from sorted(group, key=lambda sample: -sample.earned)[:number]  # stable: equals stay in order
        left_out["not among the best of their group"] += max(0, len(group) - number)


def _grouped(samples: Iterable[Sample]) -> Iterable[list[Sample]]:
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    return groups.values()


def _conversation(number: int, row: Row) -> Conversation:
    if "messages" in row:
        return Conversation(messages=_messages(number, row, "messages"))
    if "completion" in row:
        prompt = _messages(number, row, "prompt")
        return Conversation(messages=prompt + _messages(number, row, "completion"), learn_from=len(prompt))
    raise BadRow(f"{number} has neither `messages` nor `prompt` and `completion`, but {', '.join(row) or 'nothing'}")


def _pairs(rows: Iterable[tuple[int, Row]], left_out: Counter[str]) -> list[Sample]:
    """Samples of two sides: rows that are pairs, and the best and the worst of each group of other rows."""
    pairs, singles = [], []
    for number, row in rows:
        if "chosen" in row:
            pairs.append(_sample(number, row, 0.0, _sides(number, row)))
        elif "messages" not in row:
            raise BadRow(f"{number} has neither `chosen` and `rejected` nor `messages`, but {', '.join(row)}")
        elif row["messages"] is None:
            left_out[UNREAD] += 1
        else:
            earned = _return(number, row, needed=True)
            singles.append(_sample(number, row, earned, (_conversation(number, row),)))
    for group in _grouped(singles):
        best, worst = max(group, key=lambda each: each.earned), min(group, key=lambda each: each.earned)
        left_out["neither best nor worst of their group"] += max(0, len(group) - 2)
        if best.earned > worst.earned:
            sides = _split_at_fork(best.sides[0].messages, worst.sides[0].messages)
            pairs.append(dataclasses.replace(best, sides=sides))
        else:
            left_out["in a group of equal returns"] += min(2, len(group))
    return list(_without_repeats(pairs, left_out))


def _sample(number: int, row: Row, earned: float, sides: tuple[Conversation, ...]) -> Sample:
    """One sample. A row without a group is a group of its own; a row without a task is a task of its own."""
    task = str(row.get("task", f"row {number}"))
    group = f"{task}/{row['group_id']}" if "task" in row and "group_id" in row else str(row.get("group_id", task))
    return Sample(task=task if "task" in row else group, group=group, earned=earned, sides=sides)


def _sides(number: int, row: Row) -> tuple[Conversation, ...]:
    chosen, rejected = _messages(number, row, "chosen"), _messages(number, row, "rejected")
    if "prompt" not in row:
        return _split_at_fork(chosen, rejected)
    prompt = _messages(number, row, "prompt")
    return tuple(Conversation(messages=prompt + side, learn_from=len(prompt)) for side in (chosen, rejected))


def _split_at_fork(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> tuple[Conversation, ...]:
    """Two conversations, learnt from where they begin to differ: what is the same teaches no preference."""
    fork = next(
        (place for place, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other),
        min(len(chosen), len(rejected)),
    )
    return tuple(Conversation(messages=side, learn_from=fork) for side in (chosen, rejected))


def _messages(number: int, row: Row, column: str) -> tuple[Message, ...]:
    value = row.get(column)
    if not isinstance(value, list) or not value:
        raise BadRow(f"{number}: `{column}` must be a list of messages with role and content, got {value!r:.80}")
    return tuple(_message(number, column, each) for each in value)


def _message(number: int, column: str, value: object) -> Message:
    if not isinstance(value, dict) or value.get("role") not in ROLES or not isinstance(value.get("content"), str):
        raise BadRow(
            f"{number}: a message in `{column}` must have a role ({', '.join(ROLES)}) and text as content, got "
            f"{value!r:.80}"
        )
    return Message(role=value["role"], content=value["content"])


def _return(number: int, row: Row, *, needed: bool) -> float:
    earned = row.get("return")
    if isinstance(earned, int | float) and not isinstance(earned, bool) and math.isfinite(earned):
        return float(earned)
    if needed:
        raise BadRow(f"{number}: `return` must be a number, got {earned!r:.80}; rows are compared by their return")
    return 0.0


def _without_repeats(samples: Sequence[Sample], left_out: Counter[str]) -> Iterator[Sample]:
    seen = set[tuple[Conversation, ...]]()
    for sample in samples:
        if sample.sides in seen:
            left_out["identical to another row"] += 1
        else:
            seen.add(sample.sides)
            yield sample


def _place(task: str) -> float:
    """Hash a task into [0, 1). It depends on nothing else, so a task is held out in every run or in none."""
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:6]) / (1 << 48)
