"""What is done about the age of the data: which policy the surrogate is anchored at, and what each token weighs.

A mask takes a token out of the sum, never out of the count that the sum is divided by: else the tokens that stay would
weigh more, the more were masked.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from common.objective_config import ObjectiveConfig
from learner.objective.ratio import Sequences, geometric_ratio, product_ratio, ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """One number a token each, without gradient; `masked` tokens weigh 0."""

    anchor_logprobs: Float[Tensor, " tokens"]  # what the surrogate's ratio is to
    weights: Float[Tensor, " tokens"]
    masked: Bool[Tensor, " tokens"]
    truncated: Bool[Tensor, " tokens"]  # the weight was cut to its cap


def correction(
    current_logprobs: Float[Tensor, " tokens"],
    proximal_logprobs: Float[Tensor, " tokens"],
    behaviour_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    sequences: Sequences,
    objective: ObjectiveConfig,
) -> Correction:
    """The correction that `objective.correction` names, and the mask of stale negatives if that is on.

    none            anchored at behaviour, and nothing else
    token_mask      anchored at behaviour, without the tokens whose ratio is out of bounds
    sequence_mask   the same by the sequence's whole ratio
    geometric_mask  the same by the geometric mean of the sequence's ratios
    truncated_is    anchored at proximal, weighed by min(proximal / behaviour, cap)
    decoupled       anchored at proximal, weighed by proximal / behaviour, without the tokens above the cap

    At zero lag (current = proximal = behaviour) each weighs every token 1.
    """
    current = current_logprobs.detach()
    lagged_ratio = ratio(current, behaviour_logprobs)
    behaviour_weights = ratio(proximal_logprobs, behaviour_logprobs)
    nothing = torch.zeros_like(lagged_ratio, dtype=torch.bool)
    anchor, weights, masked, truncated = behaviour_logprobs, torch.ones_like(lagged_ratio), nothing, nothing
    match objective.correction:
        case "none":
            pass
        case "token_mask":
            masked = outside(lagged_ratio, low=objective.mask_low, high=objective.mask_high)
        case "sequence_mask":
            whole = product_ratio(current, behaviour_logprobs, sequences=sequences)
            masked = outside(whole, low=objective.sequence_mask_low, high=objective.sequence_mask_high)
        case "geometric_mask":
            mean = geometric_ratio(current, behaviour_logprobs, sequences=sequences)
            masked = outside(mean, low=objective.geometric_mask_low, high=objective.geometric_mask_high)
        case "truncated_is":
            anchor = proximal_logprobs
            weights = truncated_weight(behaviour_weights, max_behaviour_weight=objective.max_behaviour_weight)
            truncated = behaviour_weights > objective.max_behaviour_weight
        case "decoupled":
            anchor, weights = proximal_logprobs, behaviour_weights
            masked = outside(behaviour_weights, low=0.0, high=objective.max_behaviour_weight)
        case unknown:
            raise ValueError(f"no correction {unknown!r}")
    if objective.max_negative_kl:
        masked = masked | stale_negatives(
            current, behaviour_logprobs, advantages, sequences=sequences, max_kl=objective.max_negative_kl
        )
    return Correction(
        anchor_logprobs=anchor, weights=torch.where(masked, 0.0, weights), masked=masked, truncated=truncated
    )


def outside(lagged_ratio: Float[Tensor, " tokens"], *, low: float, high: float) -> Bool[Tensor, " tokens"]:
    """IcePop's mask, https://arxiv.org/abs/2510.18855: True where the two policies disagree too much to learn.

        masked = ratio < low or ratio > high

    Given a sequence's ratio instead of a token's it is the sequence mask of
    https://yingru.notion.site/271211a558b7808d8b12d403fd15edda (When Speed Kills Stability).

    With [0.5, 5], ratios 0.4, 0.5, 1, 5 and 6 give True, False, False, False, True.
    """
    return (lagged_ratio < low) | (lagged_ratio > high)


def truncated_weight(
    behaviour_weights: Float[Tensor, " tokens"], *, max_behaviour_weight: float
) -> Float[Tensor, " tokens"]:
    """Truncated importance sampling, https://arxiv.org/abs/1802.01561: the weight of what another policy sampled.

        weight = min(proximal / behaviour, max_behaviour_weight)

    With a cap of 2, ratios 0.5, 1 and 3 give 0.5, 1 and 2.
    """
    return behaviour_weights.clamp(max=max_behaviour_weight)


def stale_negatives(
    current_logprobs: Float[Tensor, " tokens"],
    behaviour_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    sequences: Sequences,
    max_kl: float,
) -> Bool[Tensor, " tokens"]:
    """DeepSeek-V3.2's off-policy sequence mask, https://arxiv.org/abs/2512.02556 (eq. 9).

        masked = A < 0 and mean over the sequence of (behaviour - current) > max_kl

    To make likelier what the policy has left behind pulls it back; to make that unlikelier still pushes it anywhere.

    With 0.1 nats and A = -1: two tokens of ratios 0.8 and 0.9 give a mean of 0.164 and are masked, 0.8 and 1.2 give
    0.0204 and are not; with A = 1 neither is.
    """
    kl = sequences.means(behaviour_logprobs - current_logprobs.detach())
    return (advantages < 0) & (kl > max_kl)
