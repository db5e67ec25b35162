"""Corrections for lag: a weight for each token.

A masked token is left out of the sum, but still counts in the divisor. Otherwise the other tokens would get a larger
weight, the more tokens are masked.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.imported import imported
from slipstream.learner.objective.of_shape import of_shape
from slipstream.learner.objective.ratio import Sequences, ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """One number per token, without gradient; `masked` tokens have weight 0."""

    weights: Float[Tensor, " tokens"]
    masked: Bool[Tensor, " tokens"]


def correction(
    current_logprobs: Float[Tensor, " tokens"],
    *,
    behaviour_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    lags: Int[Tensor, " tokens"] | None = None,
    max_lag: int = 0,
    sequences: Sequences,
    objective: ObjectiveConfig,
) -> Correction:
    """Apply `objective.correction`; also mask tokens that are too old and, if configured, stale negatives.

    none            no weights
    token_mask      masks tokens whose ratio is out of bounds
    module:function what the user's function of current, behaviour, advantages and sequences returns

    At zero lag (current = behaviour) every weight is 1. Of a sequence with tokens that lag by more than `max_lag` steps
    the rest is still trained; its statistics include those tokens, because the rest was sampled after them.
    """
    current = current_logprobs.detach()
    corrected = _configured(
        current,
        behaviour_logprobs=behaviour_logprobs,
        advantages=advantages,
        sequences=sequences,
        objective=objective,
    )
    masked = corrected.masked
    if lags is not None:
        masked = masked | (lags > max_lag)
    if objective.max_negative_kl:
        masked = masked | stale_negatives(
            current,
            behaviour_logprobs=behaviour_logprobs,
            advantages=advantages,
            sequences=sequences,
            max_kl=objective.max_negative_kl,
        )
    return replace(corrected, weights=torch.where(masked, 0.0, corrected.weights), masked=masked)


def _configured(
    current: Tensor,
    *,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    sequences: Sequences,
    objective: ObjectiveConfig,
) -> Correction:
    """`objective.correction` alone."""
    lagged_ratio = ratio(current, other_logprobs=behaviour_logprobs)
    match objective.correction:
        case "none":
            masked = torch.zeros_like(lagged_ratio, dtype=torch.bool)
        case "token_mask":
            masked = outside(lagged_ratio, low=objective.mask_low, high=objective.mask_high)
        case name:
            made = imported("objective.correction", name, Callable)(
                current, behaviour_logprobs=behaviour_logprobs, advantages=advantages, sequences=sequences
            )
            return of_shape(made, Correction, f"`objective.correction` {name!r}", like=current)
    return Correction(weights=torch.ones_like(lagged_ratio), masked=masked)


def outside(lagged_ratio: Float[Tensor, " tokens"], *, low: float, high: float) -> Bool[Tensor, " tokens"]:
    """IcePop's mask, https://arxiv.org/abs/2510.18855: True where the two policies differ too much.

        masked = ratio < low or ratio > high

    With [0.5, 5], ratios 0.4, 0.5, 1, 5 and 6 give True, False, False, False, True.
    """
    return (lagged_ratio < low) | (lagged_ratio > high)


def stale_negatives(
    current_logprobs: Float[Tensor, " tokens"],
    *,
    behaviour_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    sequences: Sequences,
    max_kl: float,
) -> Bool[Tensor, " tokens"]:
    """DeepSeek-V3.2's off-policy sequence mask, https://arxiv.org/abs/2512.02556 (eq. 9).

        masked = A < 0 and mean over the sequence of (behaviour - current) > max_kl

    A sequence that the policy has moved away from is masked only if its advantage is negative. To make it more likely
    pulls the policy back, but to make it even less likely pushes the policy in no particular direction.

    With 0.1 nats and A = -1: two tokens of ratios 0.8 and 0.9 give a mean of 0.164 and are masked, 0.8 and 1.2 give
    0.0204 and are not; with A = 1 neither is.
    """
    kl = sequences.means(behaviour_logprobs - current_logprobs.detach())
    return (advantages < 0) & (kl > max_kl)
