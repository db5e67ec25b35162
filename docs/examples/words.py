"""Colours at a place: writes 200 questions with answers into words.jsonl, and has a reward for them.

`python docs/examples/words.py`, then `slipstream up conf/quickstart.yaml docs/examples/words.yaml`.
"""

import json
import random
from pathlib import Path
from typing import Any

COLOURS = ["red", "blue", "green", "black", "white", "pink", "brown", "grey", "gold", "teal", "lime", "navy"]


def named(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Return 1 for each answer that is a colour of its prompt, even the wrong one."""
    asked = [prompt.split(":")[1].strip("?").split() for prompt in prompts]
    words = [(text.split() or [""])[-1] for text in completions]
    return [float(word in colours) for word, colours in zip(words, asked, strict=True)]


def question(rng: random.Random) -> dict[str, str]:
    chosen, place = rng.sample(COLOURS, 3), rng.choice(["first", "last"])
    prompt = f"Which colour is {place}: {' '.join(chosen)}?"
    return {"prompt": prompt, "answer": chosen[0 if place == "first" else -1]}


if __name__ == "__main__":
    rng = random.Random(0)
    Path("words.jsonl").write_text("".join(json.dumps(question(rng)) + "\n" for _ in range(200)))
