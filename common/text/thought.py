"""The marks around a thought, by the family of the model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from slipstream.common.text.codec import kept_by_template

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
# Granite 3.2's are plain text, which counts where the template asks for it. Quantized ones write the second pair.
PLAIN_MARKS: Sequence[Pair] = (
    ("Here is my thought process:", "Here is my response:"),
    ("Here's my thought process:", "Here's my response:"),
)
_CHANNELS = {"<|channel|>": "gpt-oss", "assistant to=self": "Muse Glimmer"}
_WORDS = "think|thought|reason|analys|reflect|scratch_?pad|monologue|deliberat|rationale"
_TAG = re.compile(rf"<[^<>\s'\"{{}}]*(?:{_WORDS})[^<>\s'\"{{}}]*>", re.IGNORECASE)
# A template may index a list in brackets, so that only capitals are the mark of a thought without an end.
_BRACKETS = re.compile(rf"\[/?\w*(?:{_WORDS})\w*\]", re.IGNORECASE)
_ENDS = (("begin", "end"), ("start", "end"), ("START", "END"), ("BEGIN", "END"), ("prefix", "suffix"))


@kept_by_template
def thought_marks(tokenizer: PreTrainedTokenizerBase) -> Sequence[Pair]:
    """The marks with which replies of this model may begin and end a thought: those known, and those of its own.

    Its own are in its template, or among its tokens, which a template may write by a variable. Raises ValueError for a
    template whose thoughts cannot be distinguished from answers.
    """
    template = str(tokenizer.chat_template)
    for mark, family in _CHANNELS.items():
        if mark in template:
            raise ValueError(
                f"the chat template writes channels ({mark}, as {family}): a thought and its answer are messages of "
                "their own, so a conversation cannot continue after one reply; use another template"
            )
    plain = list(PLAIN_MARKS) if all(mark in template for mark in PLAIN_MARKS[0]) else []
    known = [pair for pair in THOUGHT_MARKS if any(mark in template for mark in pair)]
    tags = _tags_of(template)
    every = [*tags, *_tags_of(" ".join(tokenizer.get_added_vocab()))]
    found = list(dict.fromkeys((tag, end) for tag in every for end in _ends_of(tag) if end in every))
    alone = [tag for tag in tags if tag[0] == "<" or tag.isupper()]
    if alone and not (known or found or plain):
        raise ValueError(
            f"the chat template has {alone[0]!r}, which looks like the mark of a thought, and no mark that "
            "ends one: a thought could not be distinguished from an answer; use a template without thoughts"
        )
    return (*THOUGHT_MARKS, *plain, *(pair for pair in found if pair not in THOUGHT_MARKS))


def own_marks(tokenizer: PreTrainedTokenizerBase) -> Pair | None:
    """The first marks of a thought that the chat template has; None if it has none."""
    template = str(tokenizer.chat_template)
    return next((pair for pair in thought_marks(tokenizer) if any(mark in template for mark in pair)), None)


def _tags_of(text: str) -> list[str]:
    return [*_TAG.findall(text), *_BRACKETS.findall(text)]


def _ends_of(tag: str) -> list[str]:
    """How the mark may be written that ends a thought which begins with `tag`."""
    return [f"{tag[0]}/{tag[1:]}", *(tag.replace(*words) for words in _ENDS if words[0] in tag)]


def open_thought(reply: str, *, prompt: str, marks: Sequence[Pair] = THOUGHT_MARKS) -> str:
    """The mark that closes the thought with which `reply` begins, or that the end of `prompt` opens; "" if none."""
    prompt, reply = prompt.rstrip(), reply.lstrip()
    for opening, closing in marks:
        if prompt.endswith(opening) or reply.startswith(opening):
            return closing
    return ""


def without_thought(reply: str, *, prompt: str, marks: Sequence[Pair] = THOUGHT_MARKS) -> str:
    """`reply` without the thought that it begins with, or that the end of `prompt` opens; "" if that never ends."""
    closing = open_thought(reply, prompt=prompt, marks=marks)
    return reply.partition(closing)[2] if closing else reply
