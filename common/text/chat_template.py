"""Renders conversations as text with a model's chat template.

A date in a prompt is that of the episode's start, on whatever day it is rendered.

Outside text cannot write the marks of a template: whatever a message, a call or a tool has of them is split, which
`codec` encodes as text. A reply may have those of a thought and of a call, which are the policy's, but none of those
that begin or end a message. A mark that is plain text in the template cannot be split, so text that has it is refused.

The last prompts are kept, because siblings often have the same history: in the quickstart's actor, three quarters of
the prompts came before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from slipstream.common.records.message import Message
from slipstream.common.text.codec import (
    KEPT_TEXTS,
    MAX_KEPT_CHARS,
    end_tokens,
    kept_by_template,
    marks_of,
    split_marks,
    whole_marks,
)
from slipstream.common.text.template_products import bound_products
from slipstream.common.text.thought import thought_marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

bound_products()  # before any template is compiled

Dated = tuple[str, tuple[tuple[str, str], ...]]  # a template, and the name and value of each of its dates
MAX_CHARS = 1 << 25  # of a rendered conversation
REFUSALS = (TemplateError, TypeError, LookupError, AttributeError, ArithmeticError, ValueError)  # what templates raise
_DATE_CALL = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")
_OTHER_DATE_USE = re.compile(r"strftime_now(?!\s+is\s+(not\s+)?defined\b)")
_TEXTS = ("a-first-text-4b825dc6", "a-reply-4b825dc6", "a-second-text-4b825dc6")
_USER, _REPLY, _OTHER = (
    {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), _TEXTS, strict=True)
)
_PROBES = (
    [_USER, _REPLY, _OTHER],
    [_OTHER | {"role": "system"}, _USER],
    [_USER, _REPLY, _OTHER | {"role": "tool", "tool_call_id": "4b825dc64"}],  # Mistral's ids have nine characters
)


def dated(template: str, today: datetime) -> Dated:
    """`template` with a variable in place of each call of `strftime_now`, and the variables' values.

    From 5.24 on, transformers passes no functions to templates, only data. Raises ValueError if the template names the
    format of a date otherwise than by a literal.
    """
    text, formats = _with_variables(template)
    return text, tuple((name, today.strftime(form)) for name, form in formats)


@lru_cache(maxsize=16)
def _with_variables(template: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    formats = sorted({call["format"] for call in _DATE_CALL.finditer(template)})
    names = {form: f"slipstream_date_{number}" for number, form in enumerate(formats)}
    text = _DATE_CALL.sub(lambda call: names[call["format"]], template)
    if other := _OTHER_DATE_USE.search(text):
        shown = text[other.start() : other.start() + 60]
        raise ValueError(
            f"the chat template must call strftime_now with a literal format such as '%d %b %Y', got {shown!r}: an "
            "episode keeps the date of its start; use another template"
        )
    return text, tuple((name, form) for form, name in names.items())


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    today: datetime,
    to_reply: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The conversation as the chat template renders it; with `to_reply`, up to where the policy continues."""
    called = list(tools) or None
    template = dated(tokenizer.get_chat_template(tools=called), today)
    return _applied(tokenizer, list(messages), template, to_reply=to_reply, tools=called)


def prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    today: datetime,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The conversation up to where the policy continues: what `rendered` returns, kept if it is short."""
    template = dated(tokenizer.get_chat_template(tools=list(tools) or None), today)
    make = _kept_prompt if sum(len(message.content) for message in messages) <= MAX_KEPT_CHARS else _prompt
    return make(tokenizer, tuple(messages), template, json.dumps(tools) if tools else "[]")


def _prompt(tokenizer: PreTrainedTokenizerBase, messages: tuple[Message, ...], template: Dated, tools: str) -> str:
    as_dicts = [{"role": message.role, "content": message.content} for message in messages]
    return _applied(tokenizer, as_dicts, template, to_reply=True, tools=json.loads(tools) or None)


_kept_prompt = lru_cache(maxsize=KEPT_TEXTS)(_prompt)


def _applied(
    tokenizer: PreTrainedTokenizerBase, messages: list[Any], template: Dated, *, to_reply: bool, tools: list[Any] | None
) -> str:
    turns = turn_marks(tokenizer)

    def split(message: Mapping[str, Any]) -> Any:
        if message["role"] != "assistant":
            return _each_text(message, turns.split)
        of_calls = partial(split_marks, marks=turns.every)  # the template writes those of a call itself
        changes = {"content": turns.split_reply}
        return {name: _each_text(value, changes.get(name, of_calls)) for name, value in message.items()}

    tools = _each_text(tools, turns.split)
    return _by_template(tokenizer, list(map(split, messages)), template, to_reply=to_reply, tools=tools)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with each text in it changed, the keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each_text(name, change): _each_text(each, change) for name, each in value.items()}
    return [_each_text(each, change) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnMarks:
    """The marks of a template, to be split in texts that are not its own."""

    every: frozenset[str]
    around: frozenset[str]  # those that the template writes around messages
    plain: tuple[str, ...]  # what it writes between two messages if no mark is in it

    def split(self, text: str) -> str:
        """`text` of a world with every mark split. Raises ValueError if it has one that is plain text."""
        for mark in self.plain:
            if mark in text:
                raise ValueError(
                    f"the text of a message has {mark!r}, with which the chat template ends a message as plain text: "
                    "it would be read as two; take it out, or use a template whose marks are tokens"
                )
        return split_marks(text, self.every)

    def split_reply(self, text: str) -> str:
        """A reply with the marks split that begin or end a message."""
        return split_marks(text, self.around)


@kept_by_template
def turn_marks(tokenizer: PreTrainedTokenizerBase) -> TurnMarks:
    """What a template writes around messages, found by rendering some."""
    every, around, plain = frozenset(marks_of(tokenizer)), set[str](), dict[str, None]()
    around |= {str(tokenizer.convert_ids_to_tokens(token)) for token in end_tokens(tokenizer)} & every
    for probe in _PROBES:
        try:
            named = dated(tokenizer.get_chat_template(), datetime.now(UTC))
            text = _by_template(tokenizer, probe, named, to_reply=True, tools=None)
        except REFUSALS:
            continue
        around.update(whole_marks(text, every))
        texts = [message["content"] for message in probe]
        places = [text.find(each) for each in texts]
        if sorted(places) != places or places[0] < 0:
            continue
        pieces = [text[place + len(each) :] for place, each in zip(places, texts, strict=True)]
        ends = [piece.partition(after)[0] for piece, after in zip(pieces, [*texts[1:], "\0"], strict=True)]
        plain |= {end.strip(" "): None for end in ends if end.strip() and not whole_marks(end, every)}
    of_thoughts = {mark for pair in thought_marks(tokenizer) for text in pair for mark in whole_marks(text, every)}
    return TurnMarks(every=every, around=frozenset(around - of_thoughts), plain=tuple(plain))


def _by_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[Any], template: Dated, *, to_reply: bool, tools: list[Any] | None
) -> str:
    named, dates = template
    text = str(
        tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=named, tokenize=False, add_generation_prompt=to_reply, **dict(dates)
        )
    )
    if len(text) > MAX_CHARS:
        raise MemoryError(f"it makes {len(text)} characters of {len(messages)} messages, the limit is {MAX_CHARS}")
    return text
