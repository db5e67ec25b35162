"""Checks at the start that a tokenizer can write conversations: piece by piece as in one go, and without unknown words.

A conversation is encoded in pieces: prompts, replies that are written as text, answers. They must have the tokens that
the whole conversation has, as every other program encodes it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.message import Message
from slipstream.common.text.chat import Chat, reply_form
from slipstream.common.text.codec import encoder
from slipstream.common.text.rendering import REFUSALS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASK, REPLY, ANSWER = Message("user", "Where is it?"), "The answer is 4.", Message("user", "Yes, it is 5.")
MAX_UNKNOWN = 0.01  # of all tokens
NUM_SHOWN = 5


def check_pieces(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if a reply or an answer has other tokens where it is added than in the whole conversation.

    So does a template whose thoughts cannot be distinguished from answers.
    """
    try:
        chat = Chat(tokenizer)
    except ValueError as error:
        raise ConfigError(f"`model.path` {tokenizer.name_or_path}: {error}") from None
    try:
        pieces = {"the prompt": chat.open((ASK,))}
        pieces["a reply"] = chat.written(reply_form(tokenizer).write(REPLY))
        chat.reply(pieces["a reply"])
        extension = chat.extend((ANSWER,))
    except REFUSALS:  # a template that other checks report, or that changes what is written
        return
    if extension.new_branch:  # it is rendered and encoded whole
        return
    pieces["an answer"] = extension.tokens
    rest = encoder(tokenizer)(chat.text)
    for name, tokens in pieces.items():
        part, rest = rest[: len(tokens)], rest[len(tokens) :]
        if part != tokens:
            first = next(place for place, (one, other) in enumerate(zip(tokens, part, strict=False)) if one != other)
            found, expected = (tokenizer.convert_ids_to_tokens(each[first:][:NUM_SHOWN]) for each in (tokens, part))
            raise ConfigError(
                f"the chat template and the tokenizer in {tokenizer.name_or_path} cannot be used turn by turn: {name} "
                f"has the tokens {found}, and {expected} where the whole conversation is encoded; write a template "
                "whose generation prompt ends with a special token or a line break"
            )


@dataclass(kw_only=True, slots=True)
class UnknownWords:
    """Counts the words that a tokenizer lacks: it encodes each as its one token for what is unknown."""

    tokenizer: PreTrainedTokenizerBase
    words: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0

    def count(self, text: str) -> None:
        """Count those of `text`."""
        unknown = self.tokenizer.unk_token_id
        if unknown is None or not self.tokenizer.is_fast:
            return
        encoded = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        self.num_tokens += len(encoded.ids)
        self.words.update(
            text[slice(*place)] for place, token in zip(encoded.offsets, encoded.ids, strict=True) if token == unknown
        )

    def check(self, where: str) -> None:
        """Raise ConfigError if more than MAX_UNKNOWN of the tokens are unknown."""
        num_unknown = self.words.total()
        if num_unknown > MAX_UNKNOWN * self.num_tokens:
            shown = ", ".join(map(repr, dict(self.words.most_common(NUM_SHOWN))))
            raise ConfigError(
                f"the tokenizer in {self.tokenizer.name_or_path} has no token for {num_unknown} of the "
                f"{self.num_tokens} in {where}, such as {shown}: no policy can read them; at most {MAX_UNKNOWN:.0%} "
                "may be unknown, so choose a model that knows them"
            )
