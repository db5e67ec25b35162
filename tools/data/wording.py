"""Which texts of a recorded conversation may be put in other words, and which rewrites are accepted.

What the environment read stays: the action of each reply, numbers, and in a task the words that actions use.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import regex

from slipstream.common.text.action_format import ActionFormat

THOUGHTS, TASK = "thoughts", "task"
MIN_WORDS = 3  # of a text that is rewritten
MAX_GROWTH, MORE_CHARS = 3, 200  # a rewrite has at most this many times the characters, and so many more
MAX_PATTERN_S = 1.0
_CALL = "<tool_call>"
_MARKUP = re.compile(r"</?\w+>|```\w*|^[ \t]*[A-Z]\w*:", re.MULTILINE)
_MARKS = ("<", ">", "```", "{", "}")

Messages = Sequence[dict[str, Any]]


class Refused(Exception):
    """A rewrite is not accepted; the message says why, in words that are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A text in a message."""

    message: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """What is rewritten: the assistant's thoughts before its actions, or the first message of the user."""

    rewrite: str
    pattern: "regex.Pattern[str] | None" = None  # its only group is the task's wording in that message; None: all of it
    action_format: ActionFormat | None = None  # of the replies; None: they call tools in <tool_call>

    def places(self, messages: Messages) -> list[Place]:
        """The texts to rewrite, in order. Raises Refused if the pattern takes too long."""
        if self.rewrite == TASK:
            return self._task(messages)
        return [
            place
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("loss") is not False
            for place in self._thoughts(index, message["content"])
        ]

    def _task(self, messages: Messages) -> list[Place]:
        index = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
        if index is None:
            return []
        text = messages[index]["content"]
        if self.pattern is None:
            return _trimmed(index, text, 0, len(text))
        try:
            found = self.pattern.search(text, timeout=MAX_PATTERN_S)
        except TimeoutError:
            raise Refused("`pattern` takes too long") from None
        return _trimmed(index, text, *found.span(1)) if found and found[1] else []

    def _thoughts(self, index: int, reply: str) -> list[Place]:
        places, start = list[Place](), 0
        stop = self._action_start(reply)
        for markup in _MARKUP.finditer(reply, 0, stop):
            places += _trimmed(index, reply, start, markup.start())
            start = markup.end()
        return places + _trimmed(index, reply, start, stop)

    def _action_start(self, reply: str) -> int:
        """Where the action begins; 0 without an action."""
        if self.action_format is None:
            return max(0, reply.find(_CALL))
        action = self.action_format.parse(reply)
        return max(0, reply.rfind(action.text)) if action.valid else 0

    def rewritten(self, messages: Messages, texts: Sequence[str]) -> list[dict[str, Any]]:
        """The messages with `texts` in their places. Raises Refused."""
        places = self.places(messages)
        if len(texts) != len(places):
            raise Refused("the answer is no list of as many texts")
        copied = [dict(message) for message in messages]
        for place, text in reversed(list(zip(places, texts, strict=True))):
            message, old = copied[place.message], messages[place.message]["content"][place.start : place.stop]
            _check_text(old, text)
            if self.rewrite == TASK:
                _check_task(old, text, messages)
            message["content"] = message["content"][: place.start] + text.strip() + message["content"][place.stop :]
        if copied == list(messages):
            raise Refused("a rewrite changes nothing")
        if self.rewrite == THOUGHTS and any(map(self._differs, messages, copied)):
            raise Refused("the action changes")
        return copied

    def _differs(self, old: dict[str, Any], new: dict[str, Any]) -> bool:
        """Whether another action is read from a message."""
        if old == new:
            return False
        if self.action_format is None:
            return bool(_called(old["content"]) != _called(new["content"]))
        return self.action_format.parse(old["content"]) != self.action_format.parse(new["content"])


def _called(reply: str) -> str:
    return reply[reply.find(_CALL) :]


def _trimmed(index: int, text: str, start: int, stop: int) -> list[Place]:
    """The place without white space around it; none if it has few words."""
    inside = text[start:stop]
    if len(inside.split()) < MIN_WORDS:
        return []
    start += len(inside) - len(inside.lstrip())
    return [Place(message=index, start=start, stop=start + len(inside.strip()))]


def _check_text(old: str, new: str) -> None:
    if not new.strip() or any(mark in new and mark not in old for mark in _MARKS):
        raise Refused("a rewrite is empty, or has markup")
    if len(new) > MAX_GROWTH * len(old) + MORE_CHARS:
        raise Refused("a rewrite is too long")
    if set(re.findall(r"\d+", old)) != set(re.findall(r"\d+", new)):
        raise Refused("a rewrite changes a number")


def _check_task(old: str, new: str, messages: Messages) -> None:
    """Raise Refused if a word that a reply uses has gone from the task."""
    replies = " ".join(message["content"] for message in messages if message["role"] == "assistant")
    if _words(old) & _words(replies) - _words(new):
        raise Refused("a word that the actions use is lost")


def _words(text: str) -> set[str]:
    return {word.casefold() for word in re.findall(r"\w{3,}", text)}
