"""The policy loss, composed of named parts: each a pure function in a file of its own.

    advantages (learner.weigh) -> surrogate x correction + KL - entropy -> normalisation -> one number

Policies meet in every token: behaviour sampled it some optimizer steps ago and wrote its log-probability down, proximal
is the learner at the start of the step, current is the one being trained, reference is what RL began with. Every part
gives one number a token; sums and counts are divided once, by the whole batch's over all ranks (see `learner.step`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from common.objective_config import ObjectiveConfig
from learner.objective.correction import correction
from learner.objective.kl import k2, k3
from learner.objective.normalisation import token_weights
from learner.objective.ratio import Sequences, ratio
from learner.objective.surrogate import surrogate


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """The loss and what was measured on the way, summed over loss tokens; ratios as they were before any cut."""

    loss_sum: Float[Tensor, ""]  # with gradient
    num_loss_tokens: Float[Tensor, ""]
    ratio_sum: Float[Tensor, ""]
    ratio_square_sum: Float[Tensor, ""]
    ratio_max: Float[Tensor, ""]
    mismatch_kl_sum: Float[Tensor, ""]  # nats: KL(behaviour || current), the k3 estimate
    reference_kl_sum: Float[Tensor, ""]  # nats: KL(current || reference), as the loss has it; 0 without a reference
    num_clipped_high: Float[Tensor, ""]  # advantage > 0, and the surrogate held it back
    num_clipped_low: Float[Tensor, ""]  # advantage < 0, and the surrogate held it back
    num_masked: Float[Tensor, ""]  # left out of the loss by the correction
    num_masked_sequences: Float[Tensor, ""]  # left out with every token of theirs
    num_truncated: Float[Tensor, ""]  # whose behaviour weight was cut to its cap


def policy_loss(
    current_logprobs: Float[Tensor, " tokens"],
    proximal_logprobs: Float[Tensor, " tokens"],
    behaviour_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    entropies: Float[Tensor, " tokens"],
    reference_logprobs: Float[Tensor, " tokens"] | None,
    *,
    sequences: Sequences,
    objective: ObjectiveConfig,
) -> PolicyLoss:
    """Compose what `objective` names. Arguments are of loss tokens only; current and entropies have gradients.

        loss_sum = sum(norm_weight * (behaviour_weight * surrogate + kl_coefficient * kl - entropy_bonus * entropy))

    At zero lag (current = proximal = behaviour) every correction gives the same loss and the same gradient.
    """
    corrected = correction(
        current_logprobs, proximal_logprobs, behaviour_logprobs, advantages, sequences=sequences, objective=objective
    )
    part = surrogate(
        current_logprobs, corrected.anchor_logprobs, advantages, sequences=sequences, objective=objective
    )  # fmt: skip
    losses = corrected.weights * part.losses
    reference_kl = torch.zeros_like(losses)
    if reference_logprobs is not None:
        reference_kl = {"k2": k2, "k3": k3}[objective.kl_estimator](reference_logprobs, current_logprobs)
        losses = losses + objective.kl_coefficient * reference_kl
    if objective.entropy_bonus:
        losses = losses - objective.entropy_bonus * entropies
    norm_weights = token_weights(current_logprobs, sequences=sequences, objective=objective)
    lagged_ratio = ratio(current_logprobs.detach(), behaviour_logprobs)
    ones = torch.ones_like(lagged_ratio)
    wholly_masked = sequences.means(corrected.masked.to(ones.dtype)) == 1
    return PolicyLoss(
        loss_sum=(norm_weights * losses).sum(),
        num_loss_tokens=ones.sum(),
        ratio_sum=lagged_ratio.sum(),
        ratio_square_sum=lagged_ratio.square().sum(),
        ratio_max=torch.cat([lagged_ratio, lagged_ratio.new_zeros(1)]).max(),
        mismatch_kl_sum=k3(current_logprobs.detach(), behaviour_logprobs).sum(),
        reference_kl_sum=reference_kl.detach().sum(),
        num_clipped_high=((advantages > 0) & part.held_back).float().sum(),
        num_clipped_low=((advantages < 0) & part.held_back).float().sum(),
        num_masked=corrected.masked.float().sum(),
        num_masked_sequences=(wholly_masked / sequences.sums(ones)).sum(),
        num_truncated=corrected.truncated.float().sum(),
    )
