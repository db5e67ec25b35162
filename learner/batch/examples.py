"""Training examples as token sequences: one conversation, or two of which one is preferred."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from slipstream.common.text.dialogue import Branch
from slipstream.learner.batch.pack import TokenSequence, count_loss_tokens

Goal = Literal["sft", "dpo", "reward", "prm"]
Example = tuple[list[TokenSequence], ...]
"""One side, or two with the preferred one first. A side is one or more sequences, with at least one loss token.

For a process reward model, each sequence with labels is a side.
"""


def example_of(sides: Sequence[Sequence[Branch]], goal: Goal, *, labels: Mapping[int, float]) -> Example | None:
    """The sides of an example for `goal`; None if one of them has no loss token.

    A reward model reads only the last branch of a conversation, and scores it at its last token. A process reward model
    scores each turn that has one of `labels`, by the index of its message, at its last token.
    """
    if goal == "prm":
        return tuple([labelled] for branch in sides[0] if (labelled := _at_labels(branch, labels))) or None
    read = tuple([_at_end(side[-1])] if goal == "reward" else _learnt(side) for side in sides)
    return read if all(count_loss_tokens(side) for side in read) else None


def longest(example: Example) -> int:
    """The number of tokens of the longest sequence."""
    return max(sequence.num_tokens for side in example for sequence in side)


def _learnt(branches: Sequence[Branch]) -> list[TokenSequence]:
    """The branches with loss tokens; a step puts their weights in the place of `advantages`."""
    return [TokenSequence.bare(branch.tokens, branch.loss_mask) for branch in branches if any(branch.loss_mask)]


def _at_end(branch: Branch) -> TokenSequence:
    return TokenSequence.bare(branch.tokens, [False] * (len(branch.tokens) - 1) + [True])


def _at_labels(branch: Branch, labels: Mapping[int, float]) -> TokenSequence | None:
    """The branch with the labels as its `returns`; None if none of its turns has a label."""
    at_end = {stop - 1: labels[reply] for reply, stop in branch.reply_stops.items() if reply in labels}
    if not at_end:
        return None
    sequence = TokenSequence.bare(branch.tokens, [place in at_end for place in range(len(branch.tokens))])
    returns = np.zeros(len(branch.tokens), dtype=np.float32)
    returns[list(at_end)] = list(at_end.values())
    return dataclasses.replace(sequence, returns=returns)
