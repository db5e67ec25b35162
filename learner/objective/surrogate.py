"""Surrogate losses: one loss per token, and which tokens the surrogate clipped.

Every ratio is of the current policy to the behaviour policy. Advantages have no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.imported import imported
from slipstream.learner.objective.loss_tokens import LossTokens
from slipstream.learner.objective.of_shape import of_shape
from slipstream.learner.objective.ratio import geometric_ratio, ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """One number per token."""

    losses: Float[Tensor, " tokens"]  # with gradient
    weights: Float[Tensor, " tokens"]  # gradient = -weight * A * gradient of current; 0 where a bound removed it
    held_back: Bool[Tensor, " tokens"]  # at a bound: without gradient, or (cispo) with a capped weight


def surrogate(tokens: LossTokens, *, objective: ObjectiveConfig) -> Surrogate:
    """Compute the surrogate `objective.surrogate`: a built-in one, or what the user's function returns."""
    current = tokens.current_logprobs
    match objective.surrogate:
        case "ppo_clip" | "gspo":
            is_gspo = objective.surrogate == "gspo"
            return clipped(
                gspo_ratio(tokens) if is_gspo else ratio(current, other_logprobs=tokens.behaviour_logprobs),
                advantages=tokens.advantages,
                clip_low=objective.clip_low,
                clip_high=objective.clip_high,
                dual_clip=objective.dual_clip,
            )
        case "cispo":
            return truncated_gradient(tokens, ratio_high=objective.ratio_high)
        case "policy_gradient":
            return policy_gradient(tokens)
        case "dppo_tv":
            trusted = within_total_variation(tokens, max_divergence=objective.max_total_variation)
            return trust_region(tokens, trusted=trusted, ratio_high=objective.ratio_high)
        case name:
            made = imported("objective.surrogate", name, Callable)(
                current,
                behaviour_logprobs=tokens.behaviour_logprobs,
                advantages=tokens.advantages,
                sequences=tokens.sequences,
            )
            return of_shape(made, Surrogate, f"`objective.surrogate` {name!r}", like=current)


def clipped(
    policy_ratio: Float[Tensor, " tokens"],
    *,
    advantages: Float[Tensor, " tokens"],
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> Surrogate:
    """PPO's clipped surrogate, https://arxiv.org/abs/1707.06347, with DAPO's separate bounds, 2503.14476.

        loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    and, unless `dual_clip` is 0, with the second bound of https://arxiv.org/abs/1912.09729. Without it, a negative
    advantage at a large ratio gives an unlimited loss:

        loss = min(loss, -dual_clip * A)    where A < 0

    With clips of 0.2 and 0.28: ratio 1.5 and A = 2 give -2.56, and no gradient; ratio 1.5 and A = -2 give 3; ratio 6
    and A = -2 give 12, but 6 and no gradient with a dual clip of 3.
    """
    clipped_ratio = policy_ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(policy_ratio * advantages, clipped_ratio * advantages)
    held_back = ((advantages > 0) & (policy_ratio > 1 + clip_high)) | ((advantages < 0) & (policy_ratio < 1 - clip_low))
    if dual_clip:
        negative = advantages < 0
        losses = torch.where(negative, torch.minimum(losses, -dual_clip * advantages), losses)
        held_back = held_back | (negative & (policy_ratio > dual_clip))
    weights = torch.where(held_back, 0.0, policy_ratio.detach())
    return Surrogate(losses=losses, weights=weights, held_back=held_back)


def gspo_ratio(tokens: LossTokens) -> Float[Tensor, " tokens"]:
    """GSPO's ratio, https://arxiv.org/abs/2507.18071: one for all tokens of a sequence, in its token form (eq. 14).

        s = exp(mean over the sequence of (current - behaviour))
        ratio[t] = no_gradient(s) * current[t] / no_gradient(current[t])     as probabilities: s in value

    Two tokens of ratios 4 and 1 both get 2, and a gradient of 2 to the log-probability of each.
    """
    current = tokens.current_logprobs
    whole = geometric_ratio(current.detach(), other_logprobs=tokens.behaviour_logprobs, sequences=tokens.sequences)
    return whole * torch.exp(current - current.detach())


def truncated_gradient(tokens: LossTokens, *, ratio_high: float) -> Surrogate:
    """The policy gradient, each token weighted by its capped ratio; every token keeps a gradient.

        loss = -no_gradient(min(ratio, ratio_high)) * A * current

    CISPO, https://arxiv.org/abs/2506.13585; 5 as in ScaleRL, 2510.13786. It is also AIPO's one-sided truncation,
    https://arxiv.org/abs/2505.24034.

    A ratio of 8, a cap of 5, A = 2 and a log-probability of -0.5 give 5, and a gradient of -10.
    """
    whole = _ratio_without_gradient(tokens)
    weights = whole.clamp(max=ratio_high)
    losses = -weights * tokens.advantages * tokens.current_logprobs
    return Surrogate(losses=losses, weights=weights, held_back=weights != whole)


def policy_gradient(tokens: LossTokens) -> Surrogate:
    """The policy gradient, https://doi.org/10.1007/BF00992696, for advantages that contain the ratio: V-trace's.

        loss = -A * current

    A = 2 and a log-probability of -0.5 give 1, and a gradient of -2.
    """
    advantages = tokens.advantages
    return Surrogate(
        losses=-advantages * tokens.current_logprobs,
        weights=torch.ones_like(advantages),
        held_back=torch.zeros_like(advantages, dtype=torch.bool),
    )


def trust_region(tokens: LossTokens, *, trusted: Bool[Tensor, " tokens"], ratio_high: float) -> Surrogate:
    """DPPO, https://arxiv.org/abs/2602.04879: the policy gradient of the tokens inside the trust region.

        loss = -no_gradient(min(ratio, ratio_high)) * A * current    where trusted, else 0

    A trusted token of ratio 2, A = 1 and log-probability -0.5 gives 1, and a gradient of -2.
    """
    weights = _ratio_without_gradient(tokens).clamp(max=ratio_high) * trusted
    losses = -weights * tokens.advantages * tokens.current_logprobs
    return Surrogate(losses=losses, weights=weights, held_back=~trusted)


def within_total_variation(tokens: LossTokens, *, max_divergence: float) -> Bool[Tensor, " tokens"]:
    """True where the token's probability has not moved too far in the direction that the advantage pushes.

        trusted = p - q <= max_divergence     for A > 0, with p = exp(current), q = exp(behaviour)
        trusted = p - q >= -max_divergence    for A <= 0

    With 0.2: from 0.001 to 0.1 is trusted, despite a ratio of 100; from 0.5 to 0.8 is not if A > 0, and is if A < 0.
    """
    moved = (tokens.current_logprobs.exp() - tokens.behaviour_logprobs.exp()).detach()
    return torch.where(tokens.advantages > 0, moved <= max_divergence, moved >= -max_divergence)


def _ratio_without_gradient(tokens: LossTokens) -> Tensor:
    return ratio(tokens.current_logprobs.detach(), other_logprobs=tokens.behaviour_logprobs)
