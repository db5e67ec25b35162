"""The marks around a thought, by the family of the model."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

Pair = tuple[str, str]

# Those that no reply begins with by chance, so that they are known whatever the tokenizer.
THOUGHT_MARKS: Sequence[Pair] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),  # gpt-oss
)
# Granite 3.2: plain text, which counts where the template has it.
PLAIN_MARKS: Sequence[Pair] = (
    ("Here is my thought process:", "Here is my response:"),
    ("Here's my thought process:", "Here's my response:"),
)
_LOOKS_LIKE_ONE = re.compile(r"think|thought|reason", re.IGNORECASE)
_ENDS = (("begin", "end"), ("start", "end"), ("START", "END"), ("BEGIN", "END"), ("prefix", "suffix"))


def thought_marks(tokenizer: PreTrainedTokenizerBase) -> Sequence[Pair]:
    """The marks with which replies of this model may begin and end a thought.

    Raises ValueError for a template with a mark of a thought whose end is not known.
    """
    return _thought_marks(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _thought_marks(tokenizer: PreTrainedTokenizerBase, template: str) -> Sequence[Pair]:
    plain = [pair for pair in PLAIN_MARKS if all(mark in template for mark in pair)]
    texts = {token.content for token in tokenizer.added_tokens_decoder.values()}
    known, found = "".join(map("".join, THOUGHT_MARKS)), list[Pair]()
    for text in sorted(texts):
        if text in template and _LOOKS_LIKE_ONE.search(text) and text not in known:
            ends = {text[0] + "/" + text[1:], *(text.replace(*words) for words in _ENDS)} - {text}
            found += [(text, end) for end in sorted(ends & texts)]
    lone = [
        text
        for text in sorted(texts)
        if text in template
        and _LOOKS_LIKE_ONE.search(text)
        and text not in known
        and not any(text in pair for pair in found)
    ]
    if lone:
        raise ValueError(
            f"the chat template has {lone[0]!r}, which looks like the mark of a thought, and no token that ends it is "
            "known; use a template without thoughts"
        )
    return (*THOUGHT_MARKS, *plain, *found)


def open_thought(reply: str, *, prompt: str, marks: Sequence[Pair] = THOUGHT_MARKS) -> str:
    """The mark that closes the thought with which `reply` begins, or that the end of `prompt` opens; "" if none."""
    for opening, closing in marks:
        if prompt.rstrip().endswith(opening) or reply.lstrip().startswith(opening):
            return closing
    return ""


def without_thought(reply: str, *, prompt: str, marks: Sequence[Pair] = THOUGHT_MARKS) -> str:
    """`reply` without the thought that it begins with, or that the end of `prompt` opens; "" if that never ends."""
    closing = open_thought(reply, prompt=prompt, marks=marks)
    return reply.partition(closing)[2] if closing else reply
