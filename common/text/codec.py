"""A tokenizer as functions from text to tokens and back, and the tokens with which a reply ends.

A mark is a token that only a chat template, or the policy, may write: a special token, and any other that the template
has. Text of a world may have the text of one. `split_marks` puts a character that no text has into it, and the encoder
encodes such a text without that character, and as no mark.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slipstream.common.process.config_error import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

KEPT_TEXTS = 256
MAX_KEPT_CHARS = 1 << 14  # longer texts are not kept: those with a token for each character take 200 MB in all
CONTEXT_CHARS = 64  # of the text before a piece: the longest special token has fewer
CONTEXT_TOKENS = 64  # the same, of tokens
SPLIT, REAL = "\ufdd0", "\ufdd1"  # inside a text that is no mark; before a mark, while both are in one text


def kept_by_template(make: Callable[[PreTrainedTokenizerBase], T]) -> Callable[[PreTrainedTokenizerBase], T]:
    """Keep what `make` found of the last tokenizers, each for as long as its chat template is the same."""

    @lru_cache(maxsize=8)
    def kept(tokenizer: PreTrainedTokenizerBase, template: str) -> T:
        return make(tokenizer)

    return lambda tokenizer: kept(tokenizer, str(tokenizer.chat_template))


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """A function from text to token ids that adds no token and cuts nothing off. `tokenizer` may not change later.

    The tokens of the last texts are kept, because siblings see the same: of what the quickstart's actor encodes, nine
    tenths came before.
    """
    encode, kept = _encoder(tokenizer), _kept_encoder(tokenizer)
    return lambda text: list(kept(text)) if len(text) <= MAX_KEPT_CHARS else encode(text)


@lru_cache(maxsize=8)
def _kept_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], tuple[int, ...]]:
    encode = _encoder(tokenizer)
    return lru_cache(maxsize=KEPT_TEXTS)(lambda text: tuple(encode(text)))


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """As `encoder`, of a fast tokenizer directly: the wrapper of transformers takes twice as long as the tokenizer."""
    fast = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    # transformers does this before each call: a tokenizer.json may turn either on. It may not happen while a thread
    # encodes.
    if fast is not None and fast.truncation is not None:
        fast.no_truncation()
    if fast is not None and fast.padding is not None:
        fast.no_padding()

    def encoded(text: str) -> list[int]:
        if SPLIT in text:
            return _encoded_apart(tokenizer, text)
        if fast is None:
            return list(tokenizer.encode(text, add_special_tokens=False))
        return _encoded_by(fast, text)

    return encoded


def _encoded_by(fast: Tokenizer, text: str) -> list[int]:
    """The tokens of `text`. Other threads run meanwhile if it is long, as `encode_batch` lets them and `encode` not."""
    if len(text) <= MAX_KEPT_CHARS:
        return list(fast.encode(text, add_special_tokens=False).ids)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns in every fork that follows
    return list(fast.encode_batch([text], add_special_tokens=False)[0].ids)


def following(encode: Callable[[str], list[int]], text: str, *, after: str) -> list[int]:
    """The tokens of `text` where it continues `after`. SentencePiece begins a text that stands alone with a space.

    Where the tokenizer would merge the end of `after` with the beginning of `text`, which a policy cannot, `text` is
    encoded as after a line break.
    """
    for known in (after[-CONTEXT_CHARS:], "\n"):
        before, both = encode(known), encode(known + text)
        if both[: len(before)] == before:
            return both[len(before) :]
    return encode(text)


@kept_by_template
def marks_of(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, int]:
    """The marks of a tokenizer and its chat template, by text."""
    special, template = frozenset(tokenizer.all_special_tokens), str(tokenizer.chat_template)
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if len(token.content.strip()) > 1 and (token.special or token.content in special or token.content in template)
    }


def split_marks(text: str, marks: Collection[str]) -> str:
    """`text` with SPLIT after the first character of each of `marks` in it."""
    text = text.replace(SPLIT, "\ufffd").replace(REAL, "\ufffd")
    return _first_characters(frozenset(marks)).sub(rf"\g<0>{SPLIT}", text) if marks else text


def whole_marks(text: str, marks: Collection[str]) -> list[str]:
    """The marks in `text` that are not split."""
    return _any_of(frozenset(marks)).findall(text) if marks else []


@lru_cache(maxsize=16)
def _first_characters(marks: frozenset[str]) -> re.Pattern[str]:
    """A pattern for the first character of each mark, also of one that begins inside another."""
    firsts = sorted({mark[0] for mark in marks})
    rests = {first: "|".join(sorted(re.escape(mark[1:]) for mark in marks if mark[0] == first)) for first in firsts}
    return re.compile("|".join(f"{re.escape(first)}(?={rest})" for first, rest in rests.items()))


@lru_cache(maxsize=16)
def _any_of(marks: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=lambda mark: (-len(mark), mark))))


def _encoded_apart(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text in which some marks are split. Raises ValueError if the tokenizer cannot tell them apart."""
    marks = marks_of(tokenizer)
    real = [marks[mark] for mark in whole_marks(text, marks)]
    text = _any_of(frozenset(marks)).sub(rf"{REAL}\g<0>", text).replace(SPLIT, "")
    apart = _apart(tokenizer) if tokenizer.is_fast else None
    tokens = _encoded_by(apart, text) if apart is not None else []
    ids = frozenset(marks.values()) - {tokenizer.unk_token_id}  # which words that are not known become
    if apart is None or [token for token in tokens if token in ids] != [token for token in real if token in ids]:
        raise ValueError("a text has that of a special token, which this tokenizer cannot encode as text; take it out")
    return tokens


@kept_by_template
def _apart(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The same tokenizer with REAL at the beginning of each mark, so that other text has no marks."""
    from tokenizers import Tokenizer  # here, so that importing `common` does not need it

    marks, made = marks_of(tokenizer), json.loads(tokenizer.backend_tokenizer.to_str())

    def named(text: str) -> str:
        return REAL + text if text in marks else text

    for token in made["added_tokens"]:
        token["content"] = named(token["content"])
    vocabulary, unknown = made["model"]["vocab"], made["model"].get("unk_token")
    if isinstance(vocabulary, dict):
        made["model"]["vocab"] = {named(text): number for text, number in vocabulary.items()}
    else:
        made["model"]["vocab"] = [[named(text), score] for text, score in vocabulary]
    made["model"] |= {"unk_token": named(unknown)} if unknown else {}
    return Tokenizer.from_str(json.dumps(made | {"post_processor": None, "truncation": None, "padding": None}))


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """A function from token ids to their text, special tokens included; of a fast tokenizer directly, as `encoder`."""
    if not tokenizer.is_fast or tokenizer.clean_up_tokenization_spaces:
        return lambda tokens: str(tokenizer.decode(tokens))
    fast = tokenizer.backend_tokenizer
    return lambda tokens: str(fast.decode(tokens, skip_special_tokens=False))


@lru_cache(maxsize=8)  # each episode asks
def end_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a turn: the tokenizer's own, and those in its folder's generation_config.json.

    Llama 3's tokenizer ends texts and turns with different tokens; only the generation config names the second one.
    Raises ConfigError if that file is damaged.
    """
    generation = Path(str(tokenizer.name_or_path)) / "generation_config.json"
    try:
        ends = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(f"{generation} is damaged: {error}; download it again, or write {{}} into it") from error
    found = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return frozenset(token for token in found if isinstance(token, int))


@lru_cache(maxsize=8)
def ending_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, str]:
    """The tokens that are not part of a reply's text if they are at its end, and how the chat template writes them."""
    endings = end_tokens(tokenizer).union(tokenizer.all_special_ids)
    return {token: str(tokenizer.convert_ids_to_tokens(token)) for token in endings}
