"""A script for TRL's GRPOTrainer: rows, two reward functions, one call. Three statements were changed.

How to start it: foreign.yaml.
"""

import random
from typing import Any

from datasets import Dataset

import slipstream  # changed: from trl import GRPOConfig, GRPOTrainer


def right(completions: list[str], answer: list[int], **columns: Any) -> list[float]:
    """1 for a reply whose last word is the answer."""
    return [float(text.split()[-1:] == [str(wanted)]) for text, wanted in zip(completions, answer, strict=True)]


def short(completions: list[str], **columns: Any) -> list[float]:
    """1 for no text, less for each further letter."""
    return [1 / (1 + len(text)) for text in completions]


def sums(number: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    pairs = [(rng.randint(0, 20), rng.randint(0, 20)) for _ in range(number)]
    return [{"prompt": f"What is {one} + {other}?", "answer": one + other} for one, other in pairs]


if __name__ == "__main__":
    rows = Dataset.from_list(sums(200))
    rows.to_json("build/foreign_sums.jsonl")  # changed: a new line
    # changed: GRPOTrainer(model=..., train_dataset=rows, reward_funcs=[right, short], args=GRPOConfig(...)).train()
    slipstream.train(
        dataset="build/foreign_sums.jsonl", reward=[right, short], config="docs/examples/foreign/foreign.yaml"
    )
