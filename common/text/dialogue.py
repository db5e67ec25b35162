"""Turns a recorded conversation into tokens, as a policy would have read and sampled them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.common.config.model_config import ModelConfig
from slipstream.common.records.message import Message
from slipstream.common.text.chat import Chat, Extension, reply_form
from slipstream.common.text.chat_template import REFUSALS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True, slots=True)
class Branch:
    """One token sequence of a conversation; there are several if the chat template rewrites earlier messages."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)  # True on the assistant's tokens that are to be learned
    reply_stops: dict[int, int] = field(default_factory=dict)  # where each reply ends, by the index of its message

    def add(self, tokens: list[int], *, learnt: bool) -> None:
        self.tokens += tokens
        self.loss_mask += [learnt] * len(tokens)


class Tokeniser:
    """Tokenises conversations for one model. It renders with `slipstream.common.text.chat.Chat`, as actors do."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model: ModelConfig | None = None,
        recorded_at_s: float | None = None,
    ) -> None:
        """Raises ValueError for a chat template that changes what a policy writes.

        `recorded_at_s` is the unix time whose date a template may write into the system message; default: now.
        """
        self._tokenizer = tokenizer
        self._model = model
        self._recorded_at_s = recorded_at_s
        self._form = reply_form(tokenizer)

    def branches(
        self,
        messages: Sequence[Message],
        *,
        learn_from: int = 0,
        unlearnt: Collection[int] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Branch]:
        """The token sequences of the conversation; the loss mask marks the assistant's messages from `learn_from` on.

        Those at the indices `unlearnt` are not marked. The chat template shows `tools` in every prompt.

        Each assistant message is written as a policy samples it: with its thought, where a thinking template opens
        one, and with the end-of-turn token. Messages after the last assistant message are left out. Raises ValueError
        if the first message is the assistant's, if none is, and if the template refuses them or shows no tools.
        """
        replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if not replies or replies[0] == 0:
            raise ValueError("no message is the assistant's" if not replies else "the first message is the assistant's")
        chat = Chat(self._tokenizer, model=self._model, started_at_s=self._recorded_at_s)
        try:
            branches, first = [Branch()], tuple(messages[: replies[0]])
            if tools and chat.open(first) == chat.open(first, tools=tools):
                raise ValueError("the chat template does not show tools")
            prompt = Extension(tokens=chat.open(first, tools=tools), new_branch=False)
            for place, reply in enumerate(replies):
                if prompt.new_branch:
                    branches.append(Branch())
                branches[-1].add(prompt.tokens, learnt=False)
                following = messages[reply + 1].role if reply + 1 < len(messages) else "user"
                written = chat.written(self._form.write(messages[reply].content, before=following))
                branches[-1].add(written, learnt=reply >= learn_from and reply not in unlearnt)
                branches[-1].reply_stops[reply] = len(branches[-1].tokens)
                chat.reply(written)
                if reply != replies[-1]:
                    prompt = chat.extend(tuple(messages[reply + 1 : replies[place + 1]]))
            return branches
        except ValueError:
            raise
        except REFUSALS as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
