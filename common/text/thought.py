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
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
)
# Granite 3.2's are plain text, which counts where the template asks for it.
PLAIN_MARKS: Pair = ("Here is my thought process:", "Here is my response:")
_HARMONY = "<|channel|>"
_TAG = re.compile(r"<[^<>\s'\"{}]*(?:think|thought|reason)[^<>\s'\"{}]*>", re.IGNORECASE)
_ENDS = (("begin", "end"), ("start", "end"), ("START", "END"), ("BEGIN", "END"), ("prefix", "suffix"))


def thought_marks(tokenizer: PreTrainedTokenizerBase) -> Sequence[Pair]:
    """The marks with which replies of this model may begin and end a thought: those known, and those of its template.

    Raises ValueError for a template whose thoughts cannot be distinguished from answers.
    """
    return _thought_marks(str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _thought_marks(template: str) -> Sequence[Pair]:
    if _HARMONY in template:
        raise ValueError(
            f"the chat template writes channels ({_HARMONY}, as gpt-oss): it refuses a reply with its thought, so a "
            "conversation cannot continue after one; use another template"
        )
    plain = [PLAIN_MARKS] if all(mark in template for mark in PLAIN_MARKS) else []
    known = [pair for pair in THOUGHT_MARKS if any(mark in template for mark in pair)]
    tags = dict.fromkeys(_TAG.findall(template))
    found = [(tag, end) for tag in tags for end in _ends_of(tag) if end in tags]
    if tags and not (known or found or plain):
        raise ValueError(
            f"the chat template has {next(iter(tags))!r}, which looks like the mark of a thought, and no mark that "
            "ends one: a thought could not be distinguished from an answer; use a template without thoughts"
        )
    return (*THOUGHT_MARKS, *plain, *(pair for pair in found if pair not in THOUGHT_MARKS))


def own_marks(tokenizer: PreTrainedTokenizerBase) -> Pair | None:
    """The first marks of a thought that the chat template has; None if it has none."""
    template = str(tokenizer.chat_template)
    return next((pair for pair in thought_marks(tokenizer) if any(mark in template for mark in pair)), None)


def _ends_of(tag: str) -> list[str]:
    """How the mark may be written that ends a thought which begins with `tag`."""
    return [f"{tag[0]}/{tag[1:]}", *(tag.replace(*words) for words in _ENDS if words[0] in tag)]


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
