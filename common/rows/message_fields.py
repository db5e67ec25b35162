"""Reads a recorded message, in the formats of several publishers. The tables say what each of its fields does.

Calls of tools and thoughts become text, as a policy writes them. A field that is in no table is not read; the caller
counts it. One whose name tells of a mark, a call or a thought is refused, as is any in a reply that has no text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.common.records.message import Message
from slipstream.common.records.tool_call import written_call
from slipstream.common.rows.row_source import BadRow
from slipstream.common.text.thought import THOUGHT_MARKS, open_thought

ROLES = ("system", "user", "assistant", "tool")
ROLE_OF = {"developer": "system", "human": "user"}
ROLE_OF |= dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai"), "assistant")
ROLE_OF |= dict.fromkeys(("observation", "function", "function_response", "tool_response", "tool_result"), "tool")
CALLING = ("function_call", "tool_call")  # roles of the assistant's, whose text is the JSON of one call or several
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")
# Whether a message is learned: True says that a true value means yes.
MARKS = {
    **dict.fromkeys(("loss", "loss_mask", "loss_weight", "weight", "train", "training", "trainable", "learn"), True),
    **dict.fromkeys(("masked", "is_masked", "ignore", "ignored", "no_loss"), False),
}
ROW_MARKS = MARKS | dict.fromkeys(("label", "kto_tag"), True)
READ = {"role", "from", "content", "value", "tool_calls", "function_call", *THOUGHTS, *MARKS}
WITHOUT_EFFECT = {"name", "tool_call_id", "id", "type", "timestamp", "annotations"}
# In the name of a field that may be a mark, a call or a thought.
_TELLING = re.compile("loss|mask|train|weight|learn|ignore|supervis|call|function|tool|reason|think|thought", re.I)
# In the name of a field that may be a mark of its row, if its value is yes or no.
_MARKING = re.compile("loss|mask|train|weight|learn|ignore|supervis|skip|exclu|discard", re.I)
# The same of a field of a reply.
_MARKING_A_REPLY = re.compile(rf"{_MARKING.pattern}|label|target|hid|includ|grad(?!e)", re.I)
_TWICE = (("role", "from"), ("content", "value"))  # the first is read
_NO, _YES = ("false", "0", "0.0", "no", "off"), ("true", "1", "1.0", "yes", "on")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A message as a policy reads or writes it."""

    message: Message
    is_learnt: bool  # False: a mark says so
    unread: tuple[str, ...]  # fields without a reader


def read_messages(value: object, column: str, *, system: object = None) -> list[Recorded]:
    """The messages in a column; the text `system` comes before those that do not begin with one. Raises BadRow."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"`{column}` must be a list of messages with role and content, got {value!r:.80}")
    if not isinstance(system, str | None):
        raise BadRow(f"`system` must be a text, got {system!r:.80}")
    read = [read_message(each, column) for each in value]
    if system and read[0].message.role != "system":
        read.insert(0, Recorded(message=Message("system", system), is_learnt=True, unread=()))
    elif system and read[0].message.content != system:
        read[0] = replace(read[0], unread=(*read[0].unread, "column system"))
    return read


def with_row_marks(read: Sequence[Recorded], row: Mapping[str, Any]) -> list[Recorded]:
    """The messages with the marks of their row: one for all of them, or a list with one for each. Raises BadRow."""
    marked = list(read)
    for name, yes in ROW_MARKS.items():
        given = row.get(name)
        if not isinstance(given, list):
            flags = [flag(given) if name in MARKS else None] * len(read)
        else:
            # a message that the column `system` gave has no mark
            added = [yes] if row.get("system") == read[0].message.content and len(given) == len(read) - 1 else []
            flags = [*added, *map(flag, given)]
            if len(flags) != len(read) or None in flags:
                raise BadRow(f"`{name}` must have 0 or 1 for each of the {len(read)} messages, got {given!r:.80}")
        marked = [
            replace(each, is_learnt=False) if said is (not yes) else each
            for each, said in zip(marked, flags, strict=True)
        ]
    return marked


def may_mark(name: str, value: object, names: re.Pattern[str] = _MARKING) -> bool:
    """Whether an unknown field may say what is learned: by its name, and by yes or no as its value or in its list."""
    values = value if isinstance(value, list) else [value]
    return names.search(name) is not None and any(flag(each) is not None for each in values)


def read_message(value: object, column: str) -> Recorded:
    """One message. Raises BadRow."""
    problem = BadRow(
        f"a message in `{column}` must have a role ({', '.join(ROLES)}) and text as content, or from and value, got "
        f"{value!r:.80}"
    )
    if not isinstance(value, dict):
        raise problem
    said, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    is_calling = said in CALLING
    role = "assistant" if is_calling else ROLE_OF.get(said, said) if isinstance(said, str) else said
    thoughts = [text for name in THOUGHTS if (text := value.get(name)) and role == "assistant"]
    if isinstance(content, list):
        content, inner = _joined_parts(content)
        thoughts += inner
    calls = [call for name in ("function_call", "tool_calls") for call in _calls(value.get(name) or [])]
    if is_calling and isinstance(content, str):
        calls, content = [*_calls(content), *calls], ""
    if calls and role != "assistant":
        raise BadRow(f"only a reply can have a call, got {value!r:.80} in `{column}`")
    if content is None and calls:
        content = ""
    if role not in ROLES or not isinstance(content, str) or not all(isinstance(text, str) for text in thoughts):
        raise problem
    is_learnt, unread = _marked(value, role)
    try:
        written = "\n".join([*([content] if content else []), *map(written_call, calls)])
    except ValueError as error:
        raise BadRow(str(error)) from None
    if unread and role == "assistant" and not written.strip():
        raise BadRow(f"a reply in `{column}` has no text, and `{unread[0]}` is not read; write it as content")
    return Recorded(message=Message(role, _with_thought(written, thoughts)), is_learnt=is_learnt, unread=unread)


def flag(value: object) -> bool | None:
    """Yes or no, as other formats write it: true, 1, 1.0, "true"; None for any other value."""
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    text = value.strip().lower() if isinstance(value, str) else ""
    return False if text in _NO else True if text in _YES else None


def _marked(value: dict[str, Any], role: str) -> tuple[bool, tuple[str, ...]]:
    """Whether the marks of a message let it be learned, and its unread fields. Raises BadRow."""
    is_learnt, unread = True, list[str]()
    not_read = [other for name, other in _TWICE if name in value and value.get(other) != value[name]]
    not_read += () if role == "assistant" else THOUGHTS
    for name in value:
        if name in MARKS and value[name] is not None:
            given = flag(value[name])
            if given is None:
                raise BadRow(f"`{name}` of a message must be 0, 1, false or true, got {value[name]!r:.80}")
            is_learnt &= given is MARKS[name]
            if role != "assistant" and given and MARKS[name]:
                unread.append(name)  # only replies are learned
        elif name in WITHOUT_EFFECT or value[name] in (None, "", [], {}) or (name in READ and name not in not_read):
            continue
        elif role == "assistant" and (_TELLING.search(name) or may_mark(name, value[name], _MARKING_A_REPLY)):
            raise BadRow(f"`{name}` of a reply may change what is learned, and is not known; see docs/data.md")
        else:
            unread.append(name)
    return is_learnt, tuple(unread)


def _with_thought(written: str, thoughts: Sequence[str]) -> str:
    """A reply with its thought, each once. Raises BadRow if the text begins with another one."""
    thought = "\n\n".join(text for text in dict.fromkeys(each.strip() for each in thoughts) if text)
    if not thought:
        return written
    if any(mark in thought for pair in THOUGHT_MARKS for mark in pair):
        raise BadRow(f"a thought in a field of its own must have no marks, got {thought!r:.80}")
    if not open_thought(written, prompt="") and not any(closing in written for _, closing in THOUGHT_MARKS):
        return f"<think>\n{thought}\n</think>\n\n{written}"
    if thought not in written:
        raise BadRow(f"a reply has two thoughts, one in its text and {thought!r:.80}; leave one out")
    return written


def _joined_parts(parts: Sequence[object]) -> tuple[str | None, list[str]]:
    """The text and the thoughts of a content in parts; None if a part is neither, or a thought follows a text."""
    texts, thoughts = list[str](), list[str]()
    for part in parts:
        fields = part if isinstance(part, dict) else {}
        kind = fields.get("type")
        text = fields.get("text", fields.get(kind)) if kind in ("text", *THOUGHTS) else None
        if not isinstance(text, str) or any(_TELLING.search(name) for name in fields.keys() - {"type", kind}):
            return None, []
        if kind != "text" and "".join(texts):
            return None, []
        (texts if kind == "text" else thoughts).append(text)
    return "".join(texts), thoughts


def _calls(given: object) -> list[object]:
    """Calls in a list, one call, or the JSON of either. Raises BadRow."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise BadRow(f"a call must be JSON with name and arguments, got {given!r:.80}") from None
    return given if isinstance(given, list) else [given]
