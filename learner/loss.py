"""The policy loss: a clipped surrogate on the ratio to the policy that sampled, and a correction for its age.

Two policies meet in every token: the behaviour policy, which sampled it some optimizer steps ago and wrote its
log-probability down, and the current policy, which is being trained. Every function gives one number a token; sums and
counts are divided once, by the number of loss tokens in the whole batch over all ranks (see `learner.step`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from common.config import ObjectiveConfig

# exp(20) is 5e8: a ratio of no use to anyone, whose square still fits in float32. Past it, inf * 0 would be NaN.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """The loss and what was measured on the way, summed over loss tokens; ratios as they were before any cut."""

    loss_sum: Float[Tensor, ""]  # with gradient
    num_loss_tokens: Float[Tensor, ""]
    ratio_sum: Float[Tensor, ""]
    ratio_square_sum: Float[Tensor, ""]
    ratio_max: Float[Tensor, ""]
    mismatch_kl_sum: Float[Tensor, ""]  # nats: KL(behaviour || current), the k3 estimate
    num_clipped_high: Float[Tensor, ""]  # advantage > 0 and the ratio above the clip
    num_clipped_low: Float[Tensor, ""]  # advantage < 0 and the ratio below the clip
    num_masked: Float[Tensor, ""]  # left out of the loss by the correction


def policy_loss(
    current_logprobs: Float[Tensor, " tokens"],
    behaviour_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    objective: ObjectiveConfig,
) -> PolicyLoss:
    """Compose surrogate and correction, as `objective.correction` says. Arguments are of loss tokens only.

    token_mask     clip against behaviour; tokens whose ratio is outside [mask_low, mask_high] add nothing to the sum,
                   and still count in what it is divided by: else the others would weigh more the more were masked
    truncated_is   the proximal policy is the learner at step start, which with one optimizer step a batch is the
                   current one without gradient; the surrogate is weighted by min(proximal / behaviour, max weight)
    none           clip against behaviour, and nothing else

    At zero lag (current = behaviour) all three give the same loss and the same gradient.
    """
    behaviour_ratio = ratio(current_logprobs, behaviour_logprobs)
    lagged_ratio = behaviour_ratio.detach()
    masked = torch.zeros_like(lagged_ratio, dtype=torch.bool)
    if objective.correction == "truncated_is":
        policy_ratio = ratio(current_logprobs, current_logprobs.detach())
        weight = truncated_weight(lagged_ratio, max_behaviour_weight=objective.max_behaviour_weight)
    else:
        policy_ratio = behaviour_ratio
        if objective.correction == "token_mask":
            masked = outside(lagged_ratio, low=objective.mask_low, high=objective.mask_high)
        weight = (~masked).to(lagged_ratio.dtype)
    losses = clipped_policy_loss(
        policy_ratio, advantages, clip_low=objective.clip_low, clip_high=objective.clip_high
    )  # fmt: skip
    return PolicyLoss(
        loss_sum=(weight * losses).sum(),
        num_loss_tokens=torch.ones_like(lagged_ratio).sum(),
        ratio_sum=lagged_ratio.sum(),
        ratio_square_sum=lagged_ratio.square().sum(),
        ratio_max=torch.cat([lagged_ratio, lagged_ratio.new_zeros(1)]).max(),
        mismatch_kl_sum=k3(current_logprobs.detach(), behaviour_logprobs).sum(),
        num_clipped_high=((advantages > 0) & (policy_ratio.detach() > 1 + objective.clip_high)).float().sum(),
        num_clipped_low=((advantages < 0) & (policy_ratio.detach() < 1 - objective.clip_low)).float().sum(),
        num_masked=masked.float().sum(),
    )


def ratio(
    current_logprobs: Float[Tensor, " tokens"], other_logprobs: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """How many times likelier the token is under the current policy.

        ratio = exp(current - other)

    A token of probability 0.3 then and 0.6 now has ratio 2.
    """
    return torch.exp((current_logprobs - other_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_policy_loss(
    policy_ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " tokens"]:
    """PPO's clipped surrogate, https://arxiv.org/abs/1707.06347, with DAPO's separate bounds, 2503.14476.

        loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    With clips of 0.2 and 0.28: ratio 1.5 and A = 2 give -2.56, and no gradient; ratio 1.5 and A = -2 give 3.
    """
    clipped_ratio = policy_ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(policy_ratio * advantages, clipped_ratio * advantages)


def outside(lagged_ratio: Float[Tensor, " tokens"], *, low: float, high: float) -> Bool[Tensor, " tokens"]:
    """IcePop's token mask, https://arxiv.org/abs/2510.18855: True where the two policies disagree too much to learn.

        masked = ratio < low or ratio > high

    With [0.5, 5], ratios 0.4, 0.5, 1, 5 and 6 give True, False, False, False, True.
    """
    return (lagged_ratio < low) | (lagged_ratio > high)


def truncated_weight(
    lagged_ratio: Float[Tensor, " tokens"], *, max_behaviour_weight: float
) -> Float[Tensor, " tokens"]:
    """Truncated importance sampling, https://arxiv.org/abs/1802.01561: the weight of what another policy sampled.

        weight = min(proximal / behaviour, max_behaviour_weight)

    With a cap of 2, ratios 0.5, 1 and 3 give 0.5, 1 and 2.
    """
    return lagged_ratio.clamp(max=max_behaviour_weight)


def k3(
    current_logprobs: Float[Tensor, " tokens"], behaviour_logprobs: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """Schulman's k3 estimate of KL(behaviour || current) from behaviour's own tokens, never below 0.

    http://joschu.net/blog/kl-approx.html

        k3 = ratio - 1 - log(ratio),  ratio = current / behaviour

    A ratio of 2 gives 0.307, of 0.5 gives 0.193, of 1 gives 0.
    """
    return ratio(current_logprobs, behaviour_logprobs) - 1 - (current_logprobs - behaviour_logprobs)
