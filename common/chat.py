"""A conversation as tokens: what was sampled stays as it was sampled, and only new messages are rendered.

A prompt is never built by decoding and re-encoding the past, because a tokenizer rarely gives back the tokens that a
policy sampled. Each extension renders the conversation as text, finds what is new behind what stands, and encodes that
alone. Where a chat template rewrites what stands (it drops earlier thoughts, say), a new branch begins.
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
    """Tokens that follow what stands; or, with `new_branch`, the whole prompt of a sequence of its own."""

    tokens: list[int]
    new_branch: bool


class Chat:
    """One conversation between an environment and a policy."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._encode = encoder(tokenizer)
        self._unsaid = end_tokens(tokenizer).union(tokenizer.all_special_ids)  # where a reply ends with one
        self._messages: list[dict[str, str]] = []
        self._text = ""  # what the tokens so far say, as the template wrote it
        self._ended_with = ""  # the end-of-turn token that the policy sampled itself

    def open(self, messages: tuple[Message, ...]) -> list[int]:
        """Begin with `messages` and return the first prompt."""
        self._messages = [{"role": message.role, "content": message.content} for message in messages]
        self._text = self._rendered()
        return self._encode(self._text)

    def reply(self, tokens: list[int]) -> str:
        """Record what the policy sampled and return it as text, without its end-of-turn token."""
        ended = bool(tokens) and tokens[-1] in self._unsaid
        self._ended_with = str(self._tokenizer.convert_ids_to_tokens(tokens[-1])) if ended else ""
        content = str(self._tokenizer.decode(tokens[:-1] if ended else tokens))
        self._messages.append({"role": "assistant", "content": content})
        self._text += content
        return content

    def extend(self, messages: tuple[Message, ...]) -> Extension:
        """Add the environment's answer and return what the next prompt adds."""
        self._messages += [{"role": message.role, "content": message.content} for message in messages]
        standing, self._text = self._text, self._rendered()
        if not self._text.startswith(standing):
            return Extension(tokens=self._encode(self._text), new_branch=True)
        new_text = self._text[len(standing) :].removeprefix(self._ended_with)
        return Extension(tokens=self._encode(new_text), new_branch=False)

    def _rendered(self) -> str:
        return str(self._tokenizer.apply_chat_template(self._messages, tokenize=False, add_generation_prompt=True))


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Text to the ids of all of it: nothing added, nothing cut off.

    A fast tokenizer is asked itself, because what transformers puts around it costs twice as much as it does.
    """
    if not tokenizer.is_fast:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    fast = tokenizer.backend_tokenizer
    # As transformers does before each call: a tokenizer.json may ask for either.
    fast.no_truncation()
    fast.no_padding()
    return lambda text: list(fast.encode(text, add_special_tokens=False).ids)


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a turn: the tokenizer's own, and those of the generation config in the folder that it is of.

    Llama 3's base tokenizer ends texts with another token than turns, which the generation config alone names.
    """
    generation = Path(str(tokenizer.name_or_path)) / "generation_config.json"
    ends = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    found = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return frozenset(token for token in found if isinstance(token, int))


def end_of_turn_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template writes right after an assistant's words, up to the end-of-turn token and including it."""
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    opened = str(tokenizer.apply_chat_template(conversation[:1], tokenize=False, add_generation_prompt=True))
    closed = str(tokenizer.apply_chat_template(conversation, tokenize=False))
    if not closed.startswith(opened + "b"):
        raise ValueError("the chat template does not put an assistant's words right behind its generation prompt")
    tail = closed[len(opened) + 1 :]
    ends = [str(tokenizer.convert_ids_to_tokens(token)) for token in end_tokens(tokenizer)]
    stops = [tail.index(end) + len(end) for end in ends if end in tail]
    return tail[: min(stops)] if stops else str(tokenizer.eos_token)
