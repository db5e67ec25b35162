"""A tokenizer as functions from text to tokens and back, and the tokens with which a reply ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


KEPT_TEXTS = 256
MAX_KEPT_CHARS = 1 << 14  # longer texts are not kept: those with a token for each character take 200 MB in all


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
    if not tokenizer.is_fast:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    fast = tokenizer.backend_tokenizer
    # transformers does this before each call: a tokenizer.json may turn either on.
    fast.no_truncation()
    fast.no_padding()
    return lambda text: list(fast.encode(text, add_special_tokens=False).ids)


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
    """
    generation = Path(str(tokenizer.name_or_path)) / "generation_config.json"
    ends = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    found = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return frozenset(token for token in found if isinstance(token, int))


@lru_cache(maxsize=8)
def ending_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, str]:
    """The tokens that are not part of a reply's text if they are at its end, and how the chat template writes them."""
    endings = end_tokens(tokenizer).union(tokenizer.all_special_ids)
    return {token: str(tokenizer.convert_ids_to_tokens(token)) for token in endings}
