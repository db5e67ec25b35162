"""The loss of a process reward model, whose score after a turn is the log-odds of success, and what its values give.

A label in [0, 1] is an estimate of the probability of success after a turn: 1 and 0 from a person, or the share of the
policy's completions from there that succeeded. Math-Shepherd, https://arxiv.org/abs/2312.08935, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

NUM_BINS = 10
Turns = Float64[np.ndarray, " turns"]


def probability(scores: Turns) -> Turns:
    """The probability of success that a score means: sigmoid(score). 0 means 0.5, and 2 means 0.881."""
    found: Turns = np.exp(-np.logaddexp(0.0, -scores))
    return found


def turn_loss(scores: Turns, labels: Turns) -> Turns:
    """The binary cross-entropy of each label, in nats.

        loss = -(label * log(p) + (1 - label) * log(1 - p)) = log(1 + exp(score)) - label * score,  p = sigmoid(score)

    A score of 0 costs ln 2 = 0.693 for every label; one of 2 costs 0.127 for label 1, and 1.627 for label 0.25.
    """
    loss: Turns = np.logaddexp(0.0, scores) - labels * scores
    return loss


def turn_slope(scores: Turns, labels: Turns) -> Turns:
    """How fast the loss falls as the score grows: label - p. For label 1, 0.5 at score 0, and 0.119 at 2."""
    slope: Turns = labels - probability(scores)
    return slope


def progress(probabilities: Turns) -> Turns:
    """The reward of each turn: how much it changes the probability of success. Before the first turn that counts as 0.

    Their sum is the last probability, so long episodes do not earn more. (0.5, 0.25, 1) gives (0.5, -0.25, 0.75).
    """
    return np.diff(probabilities, prepend=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """The turns whose probability lies in one tenth of [0, 1]."""

    low: float
    high: float
    turns: int
    mean_probability: float
    mean_label: float  # what a calibrated model's mean probability equals


def calibration(probabilities: Turns, labels: Turns) -> list[Bin]:
    """The bins that have turns; 1 belongs to the last one."""
    places = np.minimum((probabilities * NUM_BINS).astype(int), NUM_BINS - 1)
    return [
        Bin(
            low=place / NUM_BINS,
            high=(place + 1) / NUM_BINS,
            turns=int((places == place).sum()),
            mean_probability=float(probabilities[places == place].mean()),
            mean_label=float(labels[places == place].mean()),
        )
        for place in sorted(set(places.tolist()))
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """The mean distance of probability and label over the bins, weighted by turns. https://arxiv.org/abs/1706.04599."""
    total = sum(each.turns for each in bins)
    return sum(each.turns * abs(each.mean_probability - each.mean_label) for each in bins) / total
