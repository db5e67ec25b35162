"""Turns a conversation into tokens: sampled tokens are kept as they were sampled, and only new messages are rendered.

A prompt is never built by decoding and re-encoding the past, because a tokenizer rarely gives back the tokens that a
policy sampled. Each extension renders the conversation as text, finds the text after what was rendered before, and
encodes only that. If a chat template rewrites earlier text, for example by dropping earlier thoughts, a new branch
begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.message import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """The tokens after the conversation so far; or, with `new_branch`, the whole prompt of a new sequence."""

    tokens: list[int]
    new_branch: bool


class Chat:
    """One conversation between an environment and a policy."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._encode = encoder(tokenizer)
        self._ending = end_tokens(tokenizer).union(tokenizer.all_special_ids)  # not part of a reply's text at its end
        self._messages: list[dict[str, str]] = []
        self._text = ""  # the conversation so far, as the template rendered it
        self._ended_with = ""  # the end-of-turn token that the policy sampled itself

    def open(self, messages: tuple[Message, ...]) -> list[int]:
        """Begin with `messages` and return the first prompt."""
        self._messages = [{"role": message.role, "content": message.content} for message in messages]
        self._text = self._rendered()
        return self._encode(self._text)

    def reply(self, tokens: list[int]) -> str:
        """Record what the policy sampled and return it as text, without its end-of-turn token."""
        ended = bool(tokens) and tokens[-1] in self._ending
        self._ended_with = str(self._tokenizer.convert_ids_to_tokens(tokens[-1])) if ended else ""
        content = str(self._tokenizer.decode(tokens[:-1] if ended else tokens))
        self._messages.append({"role": "assistant", "content": content})
        self._text += content
        return content

    def extend(self, messages: tuple[Message, ...]) -> Extension:
        """Add the environment's answer; return the tokens that the next prompt adds."""
        self._messages += [{"role": message.role, "content": message.content} for message in messages]
        earlier_text, self._text = self._text, self._rendered()
        if not self._text.startswith(earlier_text):
            return Extension(tokens=self._encode(self._text), new_branch=True)
        new_text = self._text[len(earlier_text) :].removeprefix(self._ended_with)
        return Extension(tokens=self._encode(new_text), new_branch=False)

    def _rendered(self) -> str:
        return str(self._tokenizer.apply_chat_template(self._messages, tokenize=False, add_generation_prompt=True))


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """A function from text to token ids that adds no token and cuts nothing off.

    It calls a fast tokenizer directly, because the wrapper of transformers takes twice as long as the tokenizer.
    """
    if not tokenizer.is_fast:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    fast = tokenizer.backend_tokenizer
    # transformers does this before each call: a tokenizer.json may turn either on.
    fast.no_truncation()
    fast.no_padding()
    return lambda text: list(fast.encode(text, add_special_tokens=False).ids)


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a turn: the tokenizer's own, and those in its folder's generation_config.json.

    Llama 3's tokenizer ends texts and turns with different tokens; only the generation config names the second one.
    """
    generation = Path(str(tokenizer.name_or_path)) / "generation_config.json"
    ends = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    found = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return frozenset(token for token in found if isinstance(token, int))


def end_of_turn_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the template writes after an assistant's message, up to and including the end-of-turn token."""
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    opened = str(tokenizer.apply_chat_template(conversation[:1], tokenize=False, add_generation_prompt=True))
    closed = str(tokenizer.apply_chat_template(conversation, tokenize=False))
    if not closed.startswith(opened + "b"):
        raise ValueError(
            "the chat template does not render an assistant's message right after its generation prompt; use another"
        )
    tail = closed[len(opened) + 1 :]
    ends = [str(tokenizer.convert_ids_to_tokens(token)) for token in end_tokens(tokenizer)]
    stops = [tail.index(end) + len(end) for end in ends if end in tail]
    return tail[: min(stops)] if stops else str(tokenizer.eos_token)
