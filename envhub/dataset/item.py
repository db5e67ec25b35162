"""One task of a data set: a row of a file of JSON Lines or parquet."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.common.records.message import Message
from slipstream.common.records.tool_call import described_tools, listed_tools
from slipstream.envhub.asset import MAX_FILE_BYTES, read_lines
from slipstream.envhub.dataset.script import Script, read_script
from slipstream.envhub.package import require_package

Row = Mapping[str, Any]  # by column


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The names of the columns, `""` for those that are not needed. `a.b` is the field `b` of column `a`."""

    prompt: str
    answer: str
    solution: str
    conversation: str = ""  # in place of `prompt`
    tools: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One row, read."""

    row: Row
    prompt: tuple[Message, ...]
    is_chat: bool  # the row has a list of messages, not a text
    answer: Any  # None if it is not needed
    solution: str  # a whole good reply; empty if the row has none
    script: Script  # what follows the prompt, of a recorded conversation

    @property
    def answer_text(self) -> str:
        """The answer, or the first of a list of alternatives, as a policy would write it. Empty if there is none."""
        answer = self.answer[0] if isinstance(self.answer, list) else self.answer
        if answer is None:
            return ""
        return answer if isinstance(answer, str) else json.dumps(answer)


HUB = "hub:"  # what the name of a data set on a hub begins with


def read_items(source: Path | str, columns: Columns, *, check: Callable[[Item], None]) -> list[Item]:
    """Return the rows of a file, or of a data set on a hub, each of which passed `check`.

    Raises ValueError, with the number of the row, if one is malformed or `check` refused it.
    """
    items = []
    for number, row in enumerate(_rows(source) if isinstance(source, Path) else _hub_rows(source), 1):
        try:
            items.append(_item(row, columns))
            check(items[-1])
        except ValueError as error:
            raise ValueError(f"{source}, row {number}: {error}") from None
    return items


def _rows(path: Path) -> list[Row]:
    """Return the rows of a .jsonl or .parquet file. Raises ValueError if it is none, is malformed, or has no row."""
    match path.suffix:
        case ".jsonl":
            rows: list[Row] = list(read_lines(path, dict[str, Any]))
        case ".parquet":
            rows = _parquet_rows(path)
        case _:
            raise ValueError(f"{path}: the name of a data set must end in .jsonl or .parquet; convert the file")
    if not rows:
        raise ValueError(f"{path} has no rows; a row is a task")
    return rows


def _hub_rows(name: str) -> list[Row]:
    """Return the rows of `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`, by the package datasets. Raises ValueError."""
    parts = name.removeprefix(HUB).split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError(f"{name!r} must be hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT, as in hub:openai/gsm8k:main:train")
    path, *config, split = parts
    datasets = require_package("datasets", install="datasets")
    try:
        rows: list[Row] = datasets.load_dataset(path, *config, split=split).to_list()
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not rows:
        raise ValueError(f"{name} has no rows; a row is a task")
    return rows


def _item(row: Row, columns: Columns) -> Item:
    prompt = _column(row, columns.conversation or columns.prompt)
    answer = _column(row, columns.answer) if columns.answer else None
    if columns.answer and answer in (None, "", []):
        raise ValueError(f"column {columns.answer!r} must contain an answer, got {answer!r}")
    solution = _column(row, columns.solution) if columns.solution else ""
    if not isinstance(solution, str):
        raise ValueError(f"column {columns.solution!r} must be a text, got {solution!r}"[:500])
    if columns.conversation:
        messages, script = read_script(prompt, columns.conversation)
    else:
        messages, script = _messages(prompt, columns.prompt), Script()
    if columns.tools and (tools := listed_tools(_column(row, columns.tools))):
        messages = _with_tools(messages, described_tools(tools))
    return Item(
        row=row,
        prompt=messages,
        is_chat=not isinstance(prompt, str),
        answer=answer,
        solution=solution,
        script=script,
    )


def _with_tools(messages: tuple[Message, ...], described: str) -> tuple[Message, ...]:
    """The messages with a paragraph about the tools at the end of the first system message."""
    if messages[0].role == "system":
        return (Message("system", f"{messages[0].content}\n\n{described}"), *messages[1:])
    return (Message("system", described), *messages)


def _messages(prompt: Any, name: str) -> tuple[Message, ...]:
    if isinstance(prompt, str) and prompt.strip():
        return (Message("user", prompt),)
    try:
        messages = msgspec.convert(prompt, tuple[Message, ...])
    except msgspec.ValidationError:
        messages = ()
    if not messages:
        raise ValueError(
            f"column {name!r} must be a text, or a list of messages with role and content, got {prompt!r}"[:500]
        )
    return messages


def _column(row: Row, name: str) -> Any:
    """Return a column of `row`. `a.b` is the column of this name, or else the field `b` of column `a`.

    Raises ValueError if there is none.
    """
    if name in row:
        return row[name]
    found: Any = row
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise ValueError(f"there is no column {name!r}; the columns are {', '.join(map(str, row))}")
        found = found[part]
    return found


def _parquet_rows(path: Path) -> list[Row]:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} must have at most {MAX_FILE_BYTES} bytes, has {path.stat().st_size}; split the file")
    parquet = require_package("pyarrow.parquet", install="pyarrow")
    arrow = require_package("pyarrow", install="pyarrow")
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except arrow.ArrowException as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error
    return rows
