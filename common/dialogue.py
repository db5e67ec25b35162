"""A conversation that is written down, as the tokens that a policy would have read and written in it."""

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
    """One token sequence; a chat template that rewrites what stands makes several of a conversation."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)  # True on what the assistant wrote, where that is learnt from

    def add(self, tokens: list[int], *, learnt: bool) -> None:
        self.tokens += tokens
        self.loss_mask += [learnt] * len(tokens)


class Tokeniser:
    """Reads conversations for one model. Prompts are rendered as actors render them, by `common.chat.Chat`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ValueError for a chat template that does not close an assistant's words as actors expect."""
        self._tokenizer = tokenizer
        self._encode = encoder(tokenizer)
        self._end = end_of_turn_text(tokenizer)

    def branches(self, messages: Sequence[Message], *, learn_from: int = 0) -> list[Branch]:
        """The conversation, of which the assistant's messages from index `learn_from` on are learnt from.

        What the assistant wrote ends with the end-of-turn token, as a policy samples it; what others said behind its
        last message is left out. Raises ValueError where the assistant speaks first, or not at all.
        """
        replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if not replies or replies[0] == 0:
            raise ValueError("the assistant says nothing" if not replies else "the assistant speaks first")
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
