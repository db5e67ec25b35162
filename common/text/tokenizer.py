"""Loads the tokenizer of a model's folder, and hashes it: with the same hash, a conversation has the same tokens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from slipstream.common.process.config_error import ConfigError
from slipstream.common.text.codec import end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN = "\U00012000"  # of cuneiform; a tokenizer without it, and without a token for unknown words, raises
_FILES = ("tokenizer*", "tekken*", "vocab*", "spiece*")  # a tokenizer has one of these


@contextlib.contextmanager
def no_own_code(folder: Path | str) -> Iterator[None]:
    """Raise ConfigError if transformers or vLLM, in the block, needs Python code from the folder."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"`model.path` {folder} needs Python code from its folder (`auto_map`), which is never run; use a model "
            "that transformers supports"
        ) from error


def load_tokenizer(folder: Path | str, template_arguments: Mapping[str, Any] | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder`, with `template_arguments` set in its chat template.

    Raises ConfigError if it is missing, unreadable, or needs Python code.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase  # here, so that importing `common` does not need it

    try:
        with no_own_code(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer.encode(UNKNOWN)
    except ConfigError:
        raise
    except Exception as error:  # the tokenizer libraries raise many types for a damaged file
        raise ConfigError(
            f"{folder} has no readable tokenizer or config.json: {' '.join(str(error).split())}; save it there again "
            "with save_pretrained, or restore it from a backup"
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if template_arguments and tokenizer.chat_template:
        tokenizer.chat_template = with_arguments(tokenizer.chat_template, template_arguments)
    return tokenizer


def absent_ids(folder: Path | str, num_rows: int) -> list[int]:
    """The ids below `num_rows`, a model's, that the tokenizer in `folder` lacks; none for a folder without one.

    Many models have more rows than ids. No text has such an id, so engine and learner give it the probability 0.
    """
    if not any(path for name in _FILES for path in Path(folder).glob(name)):  # transformers would make an empty one
        return []
    known = set(load_tokenizer(folder).get_vocab().values())
    return [token for token in range(num_rows) if token not in known]


def with_arguments(template: str | dict[str, str], arguments: Mapping[str, Any]) -> str | dict[str, str]:
    """The chat template, or each of several by name, with `arguments` assigned at its head.

    So every rendering anywhere has the same arguments, and they are part of the hash of the tokenizer. The Python text
    of a value is its Jinja text too. Jinja drops the line break after an assignment, so nothing else is changed.
    """
    if isinstance(template, dict):
        return {name: str(with_arguments(each, arguments)) for name, each in template.items()}
    return "".join(f"{{% set {name} = {value!r} %}}\n" for name, value in arguments.items()) + template


def tokenizer_root(tokenizer: PreTrainedTokenizerBase) -> str:
    """xxh3-128 in hex over the tokenizer's rules, its chat template, and the tokens that end a turn."""
    if tokenizer.is_fast:
        makes = json.loads(tokenizer.backend_tokenizer.to_str())
        makes |= {"truncation": None, "padding": None}  # `slipstream.common.text.codec.encoder` turns both off
    else:
        makes = {"kind": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    known = {
        "makes": makes,
        "template": tokenizer.chat_template,
        "special": sorted(tokenizer.all_special_ids),
        "ends": sorted(end_tokens(tokenizer)),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(known, sort_keys=True).encode())


def text_root(tokenizer: PreTrainedTokenizerBase) -> str:
    """xxh3-128 in hex over the vocabulary and the chat template: what a model that reads conversations depends on."""
    known = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return xxhash.xxh3_128_hexdigest(json.dumps(known).encode())
