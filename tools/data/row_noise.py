"""Typing errors in the observations of a conversation. The actions stay as they are, and true.

Two neighbouring letters inside of a word are swapped, as in Belinkov & Bisk 2018 (https://arxiv.org/abs/1711.02173).
The prompt stays as it is. So does each word that the assistant writes somewhere: a policy copies such words into its
actions, and must not learn to correct them.
"""

import random
import re
from collections.abc import Sequence
from typing import Any

_WORD = re.compile(r"\b[^\W\d_]{4,}\b")
_ANY_WORD = re.compile(r"\w+")


def noisy(messages: Sequence[dict[str, Any]], *, share: float, dice: random.Random) -> list[dict[str, Any]] | None:
    """A copy in which this share of the words in observations has an error; None if no word got one."""
    roles = [message["role"] for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    written = {
        word for message in messages if message["role"] == "assistant" for word in _words(str(message["content"]))
    }

    def swapped(found: re.Match[str]) -> str:
        word = found[0]
        if word.casefold() in written or dice.random() >= share:
            return word
        places = [place for place in range(1, len(word) - 2) if word[place] != word[place + 1]]
        if not places:
            return word
        place = dice.choice(places)
        return word[:place] + word[place + 1] + word[place] + word[place + 2 :]

    copied = [
        {**message, "content": _WORD.sub(swapped, message["content"])}
        if index > first and message["role"] in ("user", "tool")
        else message
        for index, message in enumerate(messages)
    ]
    return copied if copied != list(messages) else None


def _words(text: str) -> set[str]:
    return {word.casefold() for word in _ANY_WORD.findall(text)}
