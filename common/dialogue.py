"""Turns a recorded conversation into tokens, as a policy would have read and sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.chat import Chat, Extension, encoder, end_of_turn_text
from common.message import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True, slots=True)
class Branch:
    """One token sequence of a conversation; there are several if the chat template rewrites earlier messages."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)  # True on the assistant's tokens that are to be learned

    def add(self, tokens: list[int], *, learnt: bool) -> None:
        self.tokens += tokens
        self.loss_mask += [learnt] * len(tokens)


class Tokeniser:
    """Tokenises conversations for one model. It renders prompts with `common.chat.Chat`, as actors do."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ValueError for a chat template that does not end an assistant's message as actors expect."""
        self._tokenizer = tokenizer
        self._encode = encoder(tokenizer)
        self._end = end_of_turn_text(tokenizer)

    def branches(self, messages: Sequence[Message], *, learn_from: int = 0) -> list[Branch]:
        """The token sequences of the conversation; the loss mask marks the assistant's messages from `learn_from` on.

        Each assistant message ends with the end-of-turn token, as a policy samples it. Messages after the last
        assistant message are left out. Raises ValueError if the first message is the assistant's, or if none is.
        """
        replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if not replies or replies[0] == 0:
            raise ValueError("no message is the assistant's" if not replies else "the first message is the assistant's")
        chat = Chat(self._tokenizer)
        branches = [Branch()]
        opening = chat.open(tuple(messages[: replies[0]]))
        prompt = Extension(tokens=opening, new_branch=False)
        for place, reply in enumerate(replies):
            if prompt.new_branch:
                branches.append(Branch())
            branches[-1].add(prompt.tokens, learnt=False)
            written = self._encode(messages[reply].content + self._end)
            branches[-1].add(written, learnt=reply >= learn_from)
            chat.reply(written)
            if reply != replies[-1]:
                prompt = chat.extend(tuple(messages[reply + 1 : replies[place + 1]]))
        return branches
