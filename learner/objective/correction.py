"""Corrections for lag: a weight for each token.

A masked token is left out of the sum, but still counts in the divisor. Otherwise the other tokens would get a larger
weight, the more tokens are masked.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.imported import imported
from slipstream.learner.objective.loss_tokens import LossTokens
from slipstream.learner.objective.of_shape import of_shape
from slipstream.learner.objective.ratio import ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """One number per token, without gradient; `masked` tokens have weight 0."""

    weights: Float[Tensor, " tokens"]
    masked: Bool[Tensor, " tokens"]


def correction(tokens: LossTokens, *, max_lag: int = 0, objective: ObjectiveConfig) -> Correction:
    """Apply `objective.correction`; also mask tokens that are too old and, if configured, stale negatives.

    none            no weights
    token_mask      masks tokens whose ratio is out of bounds
    module:function what the user's function of current, behaviour, advantages and sequences returns

    At zero lag (current = behaviour) every weight is 1. Of a sequence with tokens that lag by more than `max_lag` steps
    the rest is still trained; its statistics include those tokens, because the rest was sampled after them.
    """
    corrected = _configured(tokens, objective)
    masked = corrected.masked | (tokens.lags > max_lag)
    if objective.max_negative_kl:
        masked = masked | stale_negatives(tokens, max_kl=objective.max_negative_kl)
    return replace(corrected, weights=torch.where(masked, 0.0, corrected.weights), masked=masked)


def _configured(tokens: LossTokens, objective: ObjectiveConfig) -> Correction:
    """`objective.correction` alone."""
    current = tokens.current_logprobs.detach()
    lagged_ratio = ratio(current, other_logprobs=tokens.behaviour_logprobs)
    match objective.correction:
        case "none":
            masked = torch.zeros_like(lagged_ratio, dtype=torch.bool)
        case "token_mask":
            masked = outside(lagged_ratio, low=objective.mask_low, high=objective.mask_high)
        case name:
            made = imported("objective.correction", name, Callable)(
                current,
                behaviour_logprobs=tokens.behaviour_logprobs,
                advantages=tokens.advantages,
                sequences=tokens.sequences,
            )
            return of_shape(made, Correction, f"`objective.correction` {name!r}", like=current)
    return Correction(weights=torch.ones_like(lagged_ratio), masked=masked)


def outside(lagged_ratio: Float[Tensor, " tokens"], *, low: float, high: float) -> Bool[Tensor, " tokens"]:
    """IcePop's mask, https://arxiv.org/abs/2510.18855: True where the two policies differ too much.

        masked = ratio < low or ratio > high

    With [0.5, 5], ratios 0.4, 0.5, 1, 5 and 6 give True, False, False, False, True.
    """
    return (lagged_ratio < low) | (lagged_ratio > high)


def stale_negatives(tokens: LossTokens, *, max_kl: float) -> Bool[Tensor, " tokens"]:
    """DeepSeek-V3.2's off-policy sequence mask, https://arxiv.org/abs/2512.02556 (eq. 9).

        masked = A < 0 and mean over the sequence of (behaviour - current) > max_kl

    A sequence that the policy has moved away from is masked only if its advantage is negative. To make it more likely
    pulls the policy back, but to make it even less likely pushes the policy in no particular direction.

    With 0.1 nats and A = -1: two tokens of ratios 0.8 and 0.9 give a mean of 0.164 and are masked, 0.8 and 1.2 give
    0.0204 and are not; with A = 1 neither is.
    """
    kl = tokens.sequences.means(tokens.behaviour_logprobs - tokens.current_logprobs.detach())
    return (tokens.advantages < 0) & (kl > max_kl)
