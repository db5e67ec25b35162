"""Rows of recorded conversations: read, chosen, paired and split, before they become tokens.

Rows are TRL's (https://huggingface.co/docs/trl/dataset_formats), conversational: `messages`; `prompt` and `completion`;
`chosen` and `rejected`, with `prompt` or whole. What `slipstream collect` and `replay export` write has `messages` and
says of each row what it earned and which group it is of, so that pairs can be made of it: of each group the row that
earned most, preferred to the one that earned least.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config_error import ConfigError
from common.fit_config import FitConfig
from common.message import Message

ROLES = ("system", "user", "assistant", "tool")
Row = dict[str, Any]


class BadRow(ValueError):
    """A row that is none of those that can be learnt from; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages, and from which of them on the assistant's are learnt from."""

    messages: tuple[Message, ...]
    learn_from: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One conversation to imitate, or two, the preferred one first. Those of one group are never split."""

    group: str
    sides: tuple[Conversation, ...]


def read_samples(config: FitConfig, *, pairs: bool) -> tuple[list[Sample], list[Sample], Counter[str]]:
    """The samples to learn from, those that are held out, and how many rows were left out, by reason.

    Raises ConfigError with the line of the first bad row.
    """
    path = Path(config.data)
    if not config.data or not path.is_file():
        raise ConfigError(f"`fit.data` must be a file of conversations, got {config.data!r}; see docs/fitting.md")
    left_out: Counter[str] = Counter()
    numbered = list(enumerate(_rows(path), start=1))
    try:
        samples = _pairs(numbered, left_out) if pairs else _conversations(numbered, config, left_out)
    except BadRow as error:
        raise ConfigError(f"`fit.data` {path}, row {error}") from None
    samples = list(_without_repeats(samples, left_out))
    held_out = [sample for sample in samples if _place(sample.group) < config.held_out]
    taught = [sample for sample in samples if _place(sample.group) >= config.held_out]
    if not taught:
        why = ", ".join(f"{number} {reason}" for reason, number in left_out.items()) or "the file is empty"
        raise ConfigError(f"`fit.data` {path} leaves nothing to learn from: {why}, {len(held_out)} held out")
    return taught, held_out, left_out


def _rows(path: Path) -> Iterator[Row]:
    match path.suffix:
        case ".jsonl":
            with path.open() as file:
                for number, line in enumerate(file, start=1):
                    yield _parsed(path, number, line)
        case ".parquet":
            import pyarrow.parquet as pq  # only who asks for it needs pyarrow

            for batch in pq.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
        case _:
            raise ConfigError(f"`fit.data` {path}: the name must end in .jsonl or .parquet")


def _parsed(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"`fit.data` {path}, line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"`fit.data` {path}, line {number} is a {type(row).__name__}, and must be an object")
    return row


def _conversations(rows: Sequence[tuple[int, Row]], config: FitConfig, left_out: Counter[str]) -> list[Sample]:
    """To imitate: every row, or those that earned enough, or of each group the best."""
    earned: dict[str, list[tuple[float, Sample]]] = defaultdict(list)
    for number, row in rows:
        if "messages" in row and row["messages"] is None:
            left_out["without messages (see `fidelity`)"] += 1
        elif _return(number, row, needed=bool(config.best_of_group) or config.min_return > float("-inf")) < (
            config.min_return
        ):
            left_out["earned less than fit.min_return"] += 1
        else:
            sample = Sample(group=_group(number, row), sides=(_conversation(number, row),))
            earned[sample.group].append((_return(number, row, needed=False), sample))
    chosen: list[Sample] = []
    for group in earned.values():
        best = sorted(group, key=lambda each: -each[0])[: config.best_of_group or None]  # stable: equals stay in order
        left_out["not among the best of their group"] += len(group) - len(best)
        chosen += [sample for _, sample in best]
    return chosen


def _conversation(number: int, row: Row) -> Conversation:
    if "messages" in row:
        return Conversation(messages=_messages(number, row, "messages"))
    if "completion" in row:
        prompt = _messages(number, row, "prompt")
        return Conversation(messages=prompt + _messages(number, row, "completion"), learn_from=len(prompt))
    raise BadRow(f"{number} has neither `messages` nor `prompt` and `completion`, but {', '.join(row) or 'nothing'}")


def _pairs(rows: Sequence[tuple[int, Row]], left_out: Counter[str]) -> list[Sample]:
    """Rows that are pairs already, and of each group of other rows its best and its worst."""
    samples, groups = [], defaultdict[str, list[tuple[float, tuple[Message, ...]]]](list)
    for number, row in rows:
        if "chosen" in row:
            samples.append(Sample(group=_group(number, row), sides=_sides(number, row)))
        elif "messages" not in row:
            raise BadRow(f"{number} has neither `chosen` and `rejected` nor `messages`, but {', '.join(row)}")
        elif row["messages"] is None:
            left_out["without messages (see `fidelity`)"] += 1
        else:
            earned = _return(number, row, needed=True)
            groups[_group(number, row)].append((earned, _messages(number, row, "messages")))
    for group, members in groups.items():
        best, worst = max(members, key=lambda each: each[0]), min(members, key=lambda each: each[0])
        left_out["neither best nor worst of their group"] += max(0, len(members) - 2)
        if best[0] > worst[0]:
            samples.append(Sample(group=group, sides=_split_at_fork(best[1], worst[1])))
        else:
            left_out["of groups in which all earned the same"] += min(2, len(members))
    return samples


def _sides(number: int, row: Row) -> tuple[Conversation, ...]:
    chosen, rejected = _messages(number, row, "chosen"), _messages(number, row, "rejected")
    if "prompt" not in row:
        return _split_at_fork(chosen, rejected)
    prompt = _messages(number, row, "prompt")
    return tuple(Conversation(messages=prompt + side, learn_from=len(prompt)) for side in (chosen, rejected))


def _split_at_fork(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> tuple[Conversation, ...]:
    """Learnt from where the two part: what both say teaches no preference."""
    fork = next(
        (place for place, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other),
        min(len(chosen), len(rejected)),
    )
    return tuple(Conversation(messages=side, learn_from=fork) for side in (chosen, rejected))


def _messages(number: int, row: Row, column: str) -> tuple[Message, ...]:
    said = row.get(column)
    if not isinstance(said, list) or not said:
        raise BadRow(f"{number}: `{column}` must be a list of messages with role and content, got {said!r:.80}")
    return tuple(_message(number, column, each) for each in said)


def _message(number: int, column: str, said: object) -> Message:
    if not isinstance(said, dict) or said.get("role") not in ROLES or not isinstance(said.get("content"), str):
        raise BadRow(
            f"{number}: `{column}` holds {said!r:.80}; a message has a role ({', '.join(ROLES)}) and content, a text"
        )
    return Message(role=said["role"], content=said["content"])


def _return(number: int, row: Row, *, needed: bool) -> float:
    earned = row.get("return")
    if isinstance(earned, int | float) and not isinstance(earned, bool):
        return float(earned)
    if needed:
        raise BadRow(f"{number}: `return` must be a number, got {earned!r:.80}; rows are compared by what they earned")
    return 0.0


def _group(number: int, row: Row) -> str:
    """Rows of one task belong together; a row that names none stands alone."""
    return f"{row.get('task', '')}/{row['group_id']}" if "group_id" in row else f"row {number}"


def _without_repeats(samples: Sequence[Sample], left_out: Counter[str]) -> Iterator[Sample]:
    seen = set[tuple[Conversation, ...]]()
    for sample in samples:
        if sample.sides in seen:
            left_out["repeat another word for word"] += 1
        else:
            seen.add(sample.sides)
            yield sample


def _place(group: str) -> float:
    """Where a group falls in [0, 1): the same in every run, whatever other rows there are."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:6]) / (1 << 48)
