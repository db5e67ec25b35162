"""Renders conversations as text with a model's chat template.

The last prompts are kept, because siblings often have the same history: in the quickstart's actor, three quarters of
the prompts came before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from slipstream.common.records.message import Message
from slipstream.common.text.codec import KEPT_TEXTS, MAX_KEPT_CHARS
from slipstream.common.text.prompt_date import dated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    template, dates = dated(tokenizer.get_chat_template(tools=called), today)
    return _applied(tokenizer, list(messages), template, dates, to_reply=to_reply, tools=called)


def prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    today: datetime,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The conversation up to where the policy continues: what `rendered` returns, kept if it is short."""
    template, dates = dated(tokenizer.get_chat_template(tools=list(tools) or None), today)
    make = _kept_prompt if sum(len(message.content) for message in messages) <= MAX_KEPT_CHARS else _prompt
    return make(tokenizer, tuple(messages), template, tuple(dates.items()), json.dumps(tools) if tools else "[]")


def _prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: tuple[Message, ...],
    template: str,
    dates: tuple[tuple[str, str], ...],
    tools: str,
) -> str:
    as_dicts = [{"role": message.role, "content": message.content} for message in messages]
    return _applied(tokenizer, as_dicts, template, dict(dates), to_reply=True, tools=json.loads(tools) or None)


_kept_prompt = lru_cache(maxsize=KEPT_TEXTS)(_prompt)


def _applied(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Any],
    template: str,
    dates: Mapping[str, str],
    *,
    to_reply: bool,
    tools: list[Any] | None,
) -> str:
    return str(
        tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=to_reply,
            **dates,
        )
    )
