"""One task of a data set: a row of a file of JSON Lines or parquet."""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.common.records.message import Message
from slipstream.common.records.tool_call import listed_tools, with_tools
from slipstream.common.rows.message_fields import read_messages, with_row_marks
from slipstream.common.rows.row_source import Row
from slipstream.envhub.dataset.checks import Check
from slipstream.envhub.dataset.script import Script, read_script
from slipstream.envhub.user_files import read_rows

log = logging.getLogger(__name__)


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


def read_items(source: Path | str, columns: Columns, check: Check | None) -> list[Item]:
    """Return the rows of a file, or of a data set on a hub.

    Raises ValueError, with the number of a row that is malformed, or whose answer `check` cannot compare with.
    """
    items: list[Item] = []
    unread = Counter[str]()
    for number, row in read_rows(source):
        try:
            item = _item(row, columns, unread)
            if check and (check.max_tried is None or len(items) < check.max_tried):
                for answer in check.alternatives(item.answer):
                    check.accept(answer)
            items.append(item)
        except ValueError as error:
            raise ValueError(f"{source}, row {number}: {error}") from None
    if unread:
        fields = ", ".join(f"{name} ({number})" for name, number in unread.items())
        log.warning("%s: fields of messages that are not read: %s; see docs/data.md", source, fields)
    return items


def _item(row: Row, columns: Columns, unread: Counter[str]) -> Item:
    prompt = _column(row, columns.conversation or columns.prompt)
    answer = _column(row, columns.answer) if columns.answer else None
    if columns.answer and answer in (None, "", []):
        raise ValueError(f"column {columns.answer!r} must contain an answer, got {answer!r}")
    solution = _column(row, columns.solution) if columns.solution else ""
    if not isinstance(solution, str):
        raise ValueError(f"column {columns.solution!r} must be a text, got {solution!r}"[:500])
    messages: tuple[Message, ...]
    is_chat = bool(columns.conversation) or not isinstance(prompt, str) or not prompt.strip()
    asked = prompt if is_chat else [{"role": "user", "content": prompt}]
    read = read_messages(asked, columns.conversation or columns.prompt, system=row.get("system"))
    unread.update(name for each in read for name in each.unread)
    if columns.conversation:
        messages, script = read_script(with_row_marks(read, row | {columns.answer: None}), prompt, columns.conversation)
    else:
        messages, script = tuple(each.message for each in read), Script()
        if messages[-1].role == "assistant":
            raise ValueError(f"column {columns.prompt!r} ends with the assistant's message; a reply is never begun")
    if columns.tools and (tools := listed_tools(_column(row, columns.tools))):
        messages = with_tools(messages, tools)
    return Item(row=row, prompt=messages, is_chat=is_chat, answer=answer, solution=solution, script=script)


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
