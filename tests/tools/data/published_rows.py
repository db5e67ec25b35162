"""Rows with random words, in the shapes of two published sets and at the mean length of the first, 4.3 KB.

They are AgentInstruct (https://huggingface.co/datasets/THUDM/AgentInstruct) and Agent-FLAN
(https://huggingface.co/datasets/internlm/Agent-FLAN). Some are exact repeats, some differ in a few words from an
earlier row, and some cannot be read.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

MEAN_REPLIES = 5
WORDS_OF_A_MESSAGE = 90
REPEATED, CHANGED, BROKEN = 0.02, 0.05, 0.005  # shares of the rows


def published_rows(number: int, *, shape: str) -> Iterator[str]:
    """Yield lines of JSON in the columns of AgentInstruct, `instruct`, or of Agent-FLAN, `flan`."""
    dice = random.Random(f"{shape}/{number}")
    names = {"instruct": ("from", "value", "human", "gpt"), "flan": ("role", "content", "user", "assistant")}
    role, content, asks, answers = names[shape]
    newest: list[list[str]] = [_texts(dice)]
    for index in range(number):
        texts, chance = _texts(dice), dice.random()
        if chance < REPEATED:
            texts = newest[-1]
        elif chance < REPEATED + CHANGED:
            texts = [*newest[-1][:-1], f"{newest[-1][-1]} {_words(dice, 5)}"]
        elif chance < REPEATED + CHANGED + BROKEN:
            texts = texts[:1]
        newest = [*newest[-50:], texts]
        messages: list[dict[str, Any]] = [
            {role: answers if place % 2 else asks, "loss": bool(place % 2 and place > 1), content: text}
            for place, text in enumerate(texts)
        ]
        column = "conversations" if shape == "instruct" else "conversation"
        line = json.dumps({"id": f"{shape}_{index}", column: messages})
        yield line if len(texts) > 1 else line[: len(line) // 2]


def _texts(dice: random.Random) -> list[str]:
    num_replies = max(2, round(dice.expovariate(1 / MEAN_REPLIES)))
    return [_words(dice, WORDS_OF_A_MESSAGE) for _ in range(2 * num_replies)]


def _words(dice: random.Random, number: int) -> str:
    """Random words; short numbers are frequent, as short words are."""
    return " ".join(f"w{int(dice.paretovariate(0.4)) % 50_000}" for _ in range(number))
