"""Reads rows of recorded conversations in every published shape, for the verbs that fit models and `data`.

| rows                                                     | published as                                              |
|----------------------------------------------------------|-----------------------------------------------------------|
| `messages`, with or without `tools`                      | ours, TRL's, OpenAI's, verl's for SFT                     |
| `prompt` and `completion`, lists of messages             | TRL's                                                     |
| `conversations` or `conversation`, with or without a     | AgentInstruct, Agent-FLAN, OpenManus-RL, ShareGPT         |
| column `system`                                          |                                                           |

A message has `role` and `content`, or `from` and `value`. An assistant's message with `loss: false` is not learnt from.
Calls of tools are written as text, and `tools` is kept apart: see `described` in `fit_rows`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.message import Message
from slipstream.common.records.tool_call import listed_tools, written_call

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
}
COLUMNS = ("messages", "conversations", "conversation")  # of a whole conversation
SHAPES = (*COLUMNS, "prompt", "completion", "chosen", "rejected")
MAX_LINE_BYTES = 64 << 20
BATCH_ROWS = 64  # of a parquet file, in memory at a time
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escaped half of a character
Row = dict[str, Any]


class BadRow(ValueError):
    """A row in none of the known shapes; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages. Those of the assistant are learnt from, beginning with index `learn_from`, except `unlearnt`."""

    messages: tuple[Message, ...]
    learn_from: int = 0
    unlearnt: frozenset[int] = frozenset()
    labels: tuple[tuple[int, float], ...] = ()  # of messages by their index, in [0, 1]: see `labelled`
    tools: str = "[]"  # those that can be called, as JSON

    def is_learnt(self, index: int) -> bool:
        """Whether the message at `index` is learnt from."""
        return self.messages[index].role == "assistant" and index >= self.learn_from and index not in self.unlearnt


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One row of a file, or why it cannot be read."""

    number: int  # from 1
    row: Row
    fault: str = ""
    text: str = ""  # of a line that cannot be read


def read_lines(path: Path, *, skip: int = 0) -> Iterator[Line]:
    """Yield the rows of a .jsonl or .parquet file after the first `skip`, a few in memory. Raises ConfigError."""
    match path.suffix:
        case ".jsonl":
            yield from _jsonl(path, skip)
        case ".parquet":
            yield from _parquet(path, skip)
        case ".json":
            raise ConfigError(f"{path}: .json is read as a whole; convert it: jq -c '.[]' {path.name} > rows.jsonl")
        case _:
            raise ConfigError(f"{path}: the name must end in .jsonl or .parquet")


def _jsonl(path: Path, skip: int) -> Iterator[Line]:
    with path.open("rb") as file:
        number = 0
        while text := file.readline(MAX_LINE_BYTES):
            number += 1
            is_whole = text.endswith(b"\n") or len(text) < MAX_LINE_BYTES
            while not is_whole:
                rest = file.readline(MAX_LINE_BYTES)
                is_whole = rest.endswith(b"\n") or len(rest) < MAX_LINE_BYTES
                text = text[:0]
            if number <= skip:
                continue
            yield (
                _line(number, text)
                if text
                else Line(number=number, row={}, fault=f"is longer than {MAX_LINE_BYTES} bytes")
            )


def _line(number: int, text: bytes) -> Line:
    shown = text[:2000].decode(errors="replace")
    try:
        row = json.loads(text.decode("utf-8-sig"))
        if _SURROGATE.search(text):
            json.dumps(row, ensure_ascii=False).encode()  # pairs of them are a character; halves raise
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        return Line(number=number, row={}, fault=f"has half a character, {half}; complete or remove it", text=shown)
    except RecursionError:
        return Line(number=number, row={}, fault="is nested too deeply", text=shown)
    except ValueError as error:
        return Line(number=number, row={}, fault=f"is not JSON: {error}", text=shown)
    if not isinstance(row, dict):
        return Line(number=number, row={}, fault=f"must be a JSON object, got a {type(row).__name__}", text=shown)
    return Line(number=number, row=_without_nulls(row))


def _without_nulls(row: Row) -> Row:
    """The row without null conversations, which a file of several shapes has; `messages` stays if it has no other."""
    left = {name: value for name, value in row.items() if value is not None or name not in SHAPES}
    return row if "messages" in row and left.keys().isdisjoint(SHAPES) else left


def _parquet(path: Path, skip: int) -> Iterator[Line]:
    import pyarrow as pa  # only .parquet files need pyarrow
    import pyarrow.parquet as pq

    num_read = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                num_skipped = min(max(0, skip - num_read), batch.num_rows)
                num_read += num_skipped
                for row in batch.slice(num_skipped).to_pylist():
                    num_read += 1
                    yield Line(number=num_read, row=_without_nulls(row))
    except (pa.ArrowException, OSError, UnicodeError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"{path} is damaged after row {num_read}: {message}; restore it from a copy") from error


def conversation_of(row: Row) -> Conversation:
    """The conversation of a row that is no pair. Raises BadRow."""
    for column in COLUMNS:
        if column in row:
            messages, unlearnt = _messages(row, column)
            return _with_tools(row, Conversation(messages=messages, unlearnt=unlearnt))
    if "completion" in row:
        return prompted(row, "completion")
    hint = "; rows with only a prompt are tasks: see docs/dataset.md" if "prompt" in row else ""
    raise BadRow(f"neither `messages` nor `prompt` and `completion`, but {', '.join(row) or 'nothing'}{hint}")


def prompted(row: Row, column: str) -> Conversation:
    """The conversation of `prompt` and `column`, learnt from the latter; of `column` alone in a row without a prompt.

    Raises BadRow.
    """
    if "prompt" not in row and column != "completion":
        messages, unlearnt = _messages(row, column)
        return _with_tools(row, Conversation(messages=messages, unlearnt=unlearnt))
    (prompt, _), (reply, unlearnt) = _messages(row, "prompt"), _messages(row, column, begins=False)
    moved = frozenset(len(prompt) + index for index in unlearnt)
    return _with_tools(row, Conversation(messages=prompt + reply, learn_from=len(prompt), unlearnt=moved))


def labelled(row: Row, conversation: Conversation, *, hard: bool) -> Conversation:
    """The conversation with `turn_labels`: a number in [0, 1], or null, for each message of the assistant's.

    If `hard`, a label above 0 is 1. Raises BadRow.
    """
    given = row.get("turn_labels")
    first = conversation.learn_from
    replies = [index for index, each in enumerate(conversation.messages) if each.role == "assistant" and index >= first]
    if not isinstance(given, list) or len(given) != len(replies):
        raise BadRow(
            f"`turn_labels` must be a list with a number in [0, 1], or null, for each of the {len(replies)} messages "
            f"of the assistant's, got {given!r:.80}"
        )
    known = [(index, label) for index, label in zip(replies, given, strict=True) if label is not None]
    for _, label in known:
        if not isinstance(label, int | float) or not 0 <= label <= 1:
            raise BadRow(f"a label in `turn_labels` must be a number in [0, 1], or null, got {label!r:.80}")
    labels = tuple((index, float(label > 0 if hard else label)) for index, label in known)
    return replace(conversation, labels=labels)


def messages_of(row: Row, column: str) -> tuple[Message, ...]:
    """The messages in one column. Raises BadRow."""
    return _messages(row, column)[0]


def _messages(row: Row, column: str, *, begins: bool = True) -> tuple[tuple[Message, ...], frozenset[int]]:
    """The messages in one column, and the indices of those with `loss: false`.

    The text in the column `system` comes before those that begin a conversation.
    """
    value = row.get(column)
    if not isinstance(value, list) or not value:
        raise BadRow(f"`{column}` must be a list of messages with role and content, got {value!r:.80}")
    messages = [_message(column, each) for each in value]
    spared = [index for index, each in enumerate(value) if each.get("loss") is False]
    if begins and isinstance(system := row.get("system"), str) and system and messages[0].role != "system":
        messages.insert(0, Message("system", system))
        spared = [index + 1 for index in spared]
    return tuple(messages), frozenset(spared)


def _message(column: str, value: object) -> Message:
    problem = (
        f"a message in `{column}` must have a role ({', '.join(ROLES)}) and text as content, or from and value, got "
        f"{value!r:.80}"
    )
    if not isinstance(value, dict):
        raise BadRow(problem)
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    role = ALIASES.get(role, role) if isinstance(role, str) else role
    if isinstance(content, list):
        content = _joined_parts(content)
    calls = value.get("tool_calls") or []
    if content is None and calls:
        content = ""
    if role not in ROLES or not isinstance(content, str) or not isinstance(calls, list):
        raise BadRow(problem)
    return Message(role=role, content="\n".join([*([content] if content else []), *map(_call, calls)]))


def _joined_parts(parts: Sequence[object]) -> str | None:
    """The text of a content in parts; None if a part is no text."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    return "".join(text for text in texts if text is not None) if all(isinstance(text, str) for text in texts) else None


def _call(call: object) -> str:
    try:
        return written_call(call)
    except ValueError as error:
        raise BadRow(str(error)) from None


def _with_tools(row: Row, conversation: Conversation) -> Conversation:
    """The conversation with the column `tools`, a list or its JSON. Raises BadRow."""
    try:
        tools = listed_tools(row.get("tools"))
    except ValueError as error:
        raise BadRow(str(error)) from None
    return replace(conversation, tools=json.dumps(tools, default=str))
