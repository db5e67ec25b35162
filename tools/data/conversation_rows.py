"""Makes conversations of rows in every published shape, for the verbs that fit models and `data`.

docs/data.md has the table of shapes and fields. `slipstream.common.rows.message_fields` reads a message. Tools are kept
apart: see `described` in `fit_rows`.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import xxhash

from slipstream.common.records.message import Message
from slipstream.common.records.tool_call import listed_tools
from slipstream.common.rows.message_fields import (
    MARKS,
    ROW_MARKS,
    Recorded,
    flag,
    may_mark,
    read_messages,
    with_row_marks,
)
from slipstream.common.rows.row_source import BadRow, Row
from slipstream.common.text.thought import without_thought

COLUMNS = ("messages", "conversations", "conversation")  # of a whole conversation
SHAPES = (*COLUMNS, "prompt", "completion", "completions", "chosen", "rejected", "preferred_output")
LABELS = ("label", "kto_tag")  # of KTO: whether a row is good
# What a row may have beside these: columns that are used, or that say where a row is from.
KNOWN = {
    *(*SHAPES, *ROW_MARKS, "input", "non_preferred_output", "instruction", "system", "tools", "functions"),
    *("turn_labels", "task", "group_id", "return", "score", "success", "run_id", "member", "id", "source", "marks"),
    *("perturbed", "rewards", "state_keys", "fidelity", "segments", "attempt", "actor", "state", "step", "num_turns"),
    *("num_tokens", "num_branches", "policy_versions", "stop_reason"),
}
UNREAD = "without messages (see `fidelity`)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages. Those of the assistant are learnt from, beginning with index `learn_from`, except `unlearnt`."""

    messages: tuple[Message, ...]
    learn_from: int = 0
    unlearnt: frozenset[int] = frozenset()
    labels: tuple[tuple[int, float], ...] = ()  # of messages by their index, in [0, 1]: see `labelled`
    tools: str = "[]"  # those that can be called, as JSON
    unread: tuple[str, ...] = field(default=(), compare=False)  # fields of messages and marks of the row

    def is_learnt(self, index: int) -> bool:
        """Whether the message at `index` is learnt from."""
        return self.messages[index].role == "assistant" and index >= self.learn_from and index not in self.unlearnt


def reason_to_leave_out(row: Row, *, labels: bool = False) -> str:
    """Why a row is no example: it has no messages, or a mark, of which `labels` are no reason; empty if it is one."""
    if "messages" in row and all(row.get(shape) is None for shape in SHAPES):
        return UNREAD
    marks = {name: flag(row[name]) for name in ROW_MARKS if name in row and not (labels and name in LABELS)}
    said_no = [name for name, given in marks.items() if given is not None and given is not ROW_MARKS[name]]
    return f"marked `{said_no[0]}`, not to be learned" if said_no else ""


def label_of(row: Row) -> float | None:
    """1 for a good row of KTO, 0 for a bad one; None for a row without a label."""
    return next((float(given) for name in LABELS if (given := flag(row.get(name))) is not None), None)


def conversation_of(row: Row) -> Conversation:
    """The conversation of a row; of a pair, that which is preferred. Raises BadRow."""
    row = _as_pair(row)
    if row.get("chosen") is not None:
        return pair_of(row)[0]
    for column in COLUMNS:
        if row.get(column) is not None:
            return _conversation(row, read_messages(row[column], column, system=row.get("system")))
    if row.get("completion") is not None:
        return prompted(row, "completion")
    names = [name for name, value in row.items() if value is not None]
    hint = "; rows with only a prompt are tasks: see docs/dataset.md" if "prompt" in names else ""
    raise BadRow(f"neither `messages` nor `prompt` and `completion`, but {', '.join(names) or 'nothing'}{hint}")


def is_pair(row: Row) -> bool:
    """Whether a row says what is preferred. Raises BadRow."""
    return _as_pair(row).get("chosen") is not None


def pair_of(row: Row) -> tuple[Conversation, Conversation]:
    """What is preferred, and what is not, learnt from after the prompt or where they begin to differ. Raises BadRow."""
    row = _as_pair(row)
    chosen, rejected = prompted(row, "chosen"), prompted(row, "rejected")
    return (chosen, rejected) if chosen.learn_from and rejected.learn_from else from_fork(chosen, rejected)


def from_fork(chosen: Conversation, rejected: Conversation) -> tuple[Conversation, Conversation]:
    """Two conversations, learnt from where they begin to differ: what is the same teaches no preference."""
    both = chosen.messages, rejected.messages
    fork = next(
        (place for place, (one, other) in enumerate(zip(*both, strict=False)) if one != other), min(map(len, both))
    )
    return replace(chosen, learn_from=fork), replace(rejected, learn_from=fork)


def replies_alike(one: Conversation, other: Conversation) -> bool:
    """Whether both have the same messages, apart from thoughts."""
    said = [
        [(each.role, without_thought(each.content, prompt="").strip()) for each in side.messages]
        for side in (one, other)
    ]
    return said[0] == said[1]


def prompted(row: Row, column: str) -> Conversation:
    """The conversation of the prompt and `column`, learnt from the latter; of `column` alone without a prompt.

    The prompt is the column `prompt`, a text or messages, or else a conversation that `column` continues. A side that
    begins with the prompt has it once. Raises BadRow.
    """
    given, system = row.get(column), row.get("system")
    side = read_messages([given] if isinstance(given, dict) else given, column)
    base = next((name for name in ("prompt", *COLUMNS) if row.get(name) is not None), "")
    if column != "completion" and (not base or (base != "prompt" and side[0].message.role != "assistant")):
        return _conversation(row, read_messages(given, column, system=system))
    asked = row.get(base)
    asked = [{"role": "user", "content": asked}] if base == "prompt" and isinstance(asked, str) and asked else asked
    prompt = read_messages(asked, base or "prompt", system=system)
    said = [[each.message for each in part if each.message.role != "system"] for part in (prompt, side)]
    if said[0] == said[1][: len(said[0])]:
        own = [each for each in side if each.message.role == "system"]
        prompt = prompt if prompt[0].message.role == "system" else [*own, *prompt]
        side = [each for each in side if each.message.role != "system"][len(said[0]) :]
    elif side[0].message.role == "system" or (
        side[0].message.role == "user" and prompt[-1].message.role == "user" and isinstance(row.get(base), str)
    ):
        raise BadRow(f"`{column}` begins again, and not with `{base}`; begin it with the reply, or with all of it")
    return _conversation(row, [*prompt, *side], learn_from=len(prompt))


def _as_pair(row: Row) -> Row:
    """The row with `prompt`, `chosen` and `rejected` where it prefers something in another format. Raises BadRow."""
    if row.get("preferred_output") is not None:
        if not isinstance(asked := row.get("input"), dict):
            raise BadRow(f"`input` must have messages, beside `preferred_output`, got {asked!r:.80}")
        sides = {"chosen": row["preferred_output"], "rejected": row.get("non_preferred_output")}
        return row | {"prompt": asked.get("messages"), "tools": asked.get("tools")} | sides
    if row.get("completions") is None or any(row.get(name) is not None for name in (*COLUMNS, "chosen")):
        return row
    try:
        scores = [float(each.get("score", each.get("overall_score"))) for each in row["completions"]]
        replies = [[{"role": "assistant", "content": each["response"]}] for each in row["completions"]]
        if not all(map(math.isfinite, scores)):
            raise ValueError
        best, worst = (replies[scores.index(most)] for most in (max(scores), min(scores)))
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
        given = row["completions"]
        raise BadRow(f"`completions` must have responses with a score or overall_score, got {given!r:.80}") from None
    return row | {"prompt": row.get("prompt") or row.get("instruction"), "chosen": best, "rejected": worst}


def _conversation(row: Row, read: Sequence[Recorded], *, learn_from: int = 0) -> Conversation:
    """The conversation of messages that were read, with the marks and the tools of their row. Raises BadRow."""
    read = with_row_marks(read, row)
    unread = [name for each in read for name in each.unread]
    for name, value in row.items():
        is_mark = isinstance(value, list) or flag(value) is not None
        if value in (None, "") or (is_mark if name in ROW_MARKS else name in KNOWN):
            continue
        if name in MARKS or (name in LABELS and str(value).strip().lower() in ("-1", "desirable", "undesirable")):
            raise BadRow(f"`{name}` must be 0, 1, false or true, got {value!r:.80}")
        if value and name in ("image", "images", "videos", "audios"):
            raise BadRow(f"column `{name}` has what is no text, and only texts are learned; leave such rows out")
        if name not in ROW_MARKS and may_mark(name, value):
            raise BadRow(f"column `{name}` may change what is learned, and is not known; see docs/data.md")
        unread.append(f"column {name}")
    for others in (COLUMNS, ("tools", "functions")):  # of which the first is read
        unread += [f"column {name}" for name in list(filter(row.get, others))[1:]]
    messages = tuple(each.message for each in read)
    unlearnt = frozenset(
        index for index, each in enumerate(read) if not each.is_learnt and each.message.role == "assistant"
    )
    try:
        tools = listed_tools(row.get("tools")) or listed_tools(row.get("functions"))
    except ValueError as error:
        raise BadRow(str(error)) from None
    return Conversation(
        messages=messages,
        learn_from=learn_from,
        unlearnt=unlearnt,
        tools=json.dumps(tools, default=str),
        unread=tuple(unread),
    )


def prompt_task(conversation: Conversation) -> str:
    """A name for the messages before the first reply: the task of a row that names none."""
    prompt = xxhash.xxh3_64()
    for message in conversation.messages:
        if message.role == "assistant":
            break
        prompt.update(f"{message.role}\0{message.content}\0".encode(errors="replace"))
    return f"prompt/{prompt.hexdigest()}"


def labelled(row: Row, conversation: Conversation) -> Conversation:
    """The conversation with `turn_labels`: in [0, 1], or null, for each message of the assistant's. Raises BadRow."""
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
    labels = tuple((index, float(label)) for index, label in known)
    return replace(conversation, labels=labels)
