"""The preference loss of a pair, as a function of its margin, and its slope."""

import numpy as np
from jaxtyping import Float64

Margins = Float64[np.ndarray, " pairs"]


def preference_loss(margins: Margins) -> Margins:
    """The Bradley-Terry loss: the surprise, in nats, that the preferred side of each pair is preferred.

        loss = -log(sigmoid(margin)) = log(1 + exp(-margin))

    A margin of 0 costs ln 2 = 0.693, one of 2 costs 0.127. https://doi.org/10.2307/2334029
    """
    loss: Margins = np.logaddexp(0.0, -margins)
    return loss


def preference_slope(margins: Margins) -> Margins:
    """How fast the loss falls as the margin grows: sigmoid(-margin). At 0 it is 0.5, at 2 it is 0.119."""
    slope: Margins = np.exp(-np.logaddexp(0.0, margins))
    return slope


def dpo_margins(policy: Margins, *, reference: Margins, beta: float) -> Margins:
    """The implicit margins of a policy, relative to the policy that it began as.

        margin = beta * ((logprob(chosen) - logprob(rejected)) - the same of the reference)

    `policy` and `reference` are the differences, each log-probability summed over the loss tokens. With beta 0.1, a
    policy that moved a difference from -5 to 5 has a margin of 1. DPO, https://arxiv.org/abs/2305.18290, equation 7.
    """
    margins: Margins = beta * (policy - reference)
    return margins
