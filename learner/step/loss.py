"""The policy loss, composed of parts: each is a pure function in its own file.

    advantages -> surrogate x correction + KL - entropy -> normalisation -> one number

Advantages are of `slipstream.learner.credit.token_advantages`. Up to three policies give a log-probability to each
token. Behaviour sampled it some optimizer steps ago and recorded its log-probability. Current is the policy being
trained. Reference is the policy that the KL divergence is measured from. Every part gives one number per token. Sums
are divided once, by counts of the whole batch over all ranks (see `slipstream.learner.step.step`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.objective.correction import Correction, correction
from slipstream.learner.objective.kl import k3, reference_divergence
from slipstream.learner.objective.lag import by_lag
from slipstream.learner.objective.loss_tokens import LossTokens
from slipstream.learner.objective.normalisation import token_weights
from slipstream.learner.objective.ratio import MAX_LOG_RATIO, ratio
from slipstream.learner.objective.surrogate import Surrogate, surrogate
from slipstream.replay.records.step_tokens import CLIPPED, LEFT_OUT, TRAINED

LARGEST_RATIO = 60_000.0  # that half precision has


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """The loss, and sums over loss tokens for metrics; ratios are those before any clip, cap or mask.

    The guard (`slipstream.learner.objective.guard`) needs sums after every clip, cap and mask: of the weights of tokens
    with a gradient, and for each sequence of the tokens that the correction did not mask.
    """

    loss_sum: Float[Tensor, ""]  # with gradient
    num_loss_tokens: Float[Tensor, ""]
    ratio_sum: Float[Tensor, ""]
    ratio_square_sum: Float[Tensor, ""]
    ratio_max: Float[Tensor, ""]
    mismatch_kl_sum: Float[Tensor, ""]  # nats: KL(behaviour || current), the k3 estimate
    reference_kl_sum: Float[Tensor, ""]  # nats: KL(current || reference) as in the loss; 0 without a reference
    num_clipped_high: Float[Tensor, ""]  # advantage > 0, and the surrogate clipped it
    num_clipped_low: Float[Tensor, ""]  # advantage < 0, and the surrogate clipped it
    num_masked: Float[Tensor, ""]  # tokens that the correction masked
    num_sequences: Float[Tensor, ""]  # with loss tokens
    num_masked_sequences: Float[Tensor, ""]  # whose every token is masked
    num_weighed: Float[Tensor, ""]  # tokens with a gradient from the surrogate
    weight_sum: Float[Tensor, ""]  # over those: gradient = -weight * advantage * gradient of the log-probability
    weight_square_sum: Float[Tensor, ""]
    left_log_ratio_sums: Float[Tensor, " sequences"]  # nats: of current to behaviour, over tokens that are not masked
    num_left_tokens: Float[Tensor, " sequences"]
    by_lag: Float[Tensor, "buckets sums"]  # see `slipstream.learner.objective.lag`
    ratios: Float[Tensor, " tokens"]  # of each token, at most LARGEST_RATIO, in half precision
    fates: UInt8[Tensor, " tokens"]  # see `slipstream.replay.records.step_tokens`


def policy_loss(tokens: LossTokens, *, max_lag: int = 0, objective: ObjectiveConfig) -> PolicyLoss:
    """Compute the loss that `objective` configures; tokens that lag by more than `max_lag` steps are masked.

        loss_sum = sum(norm_weight * (behaviour_weight * surrogate + kl_coefficient * kl - entropy_bonus * entropy))

    At zero lag (current = behaviour) every correction gives the same loss and the same gradient.
    """
    corrected = correction(tokens, max_lag=max_lag, objective=objective)
    part = surrogate(tokens, objective=objective)
    reference_kl = _reference_kl(tokens)
    losses = corrected.weights * part.losses
    if tokens.reference_logprobs is not None:
        losses = losses + objective.kl_coefficient * reference_kl
    if objective.entropy_bonus:
        losses = losses - objective.entropy_bonus * tokens.entropies
    norm_weights = token_weights(tokens.current_logprobs, sequences=tokens.sequences, objective=objective)
    return PolicyLoss(
        loss_sum=(norm_weights * losses).sum(),
        reference_kl_sum=reference_kl.detach().sum(),
        **_ratio_sums(tokens, corrected, part),
        **_bound_sums(tokens, corrected, part),
        **_guard_sums(tokens, corrected, part),
    )


def _reference_kl(tokens: LossTokens) -> Tensor:
    """The divergence from the reference by token; 0 without a reference."""
    if tokens.reference_logprobs is None:
        return torch.zeros_like(tokens.current_logprobs)
    return reference_divergence(
        tokens.current_logprobs,
        behaviour_logprobs=tokens.behaviour_logprobs,
        reference_logprobs=tokens.reference_logprobs,
    )


def _ratio_sums(tokens: LossTokens, corrected: Correction, part: Surrogate) -> dict[str, Tensor]:
    """The number of tokens, and sums of their ratios before any clip, cap or mask."""
    current = tokens.current_logprobs.detach()
    ratios = ratio(current, other_logprobs=tokens.behaviour_logprobs)
    clipped = part.held_back & (tokens.advantages != 0)
    return {
        "num_loss_tokens": torch.ones_like(ratios).sum(),
        "ratio_sum": ratios.sum(),
        "ratio_square_sum": ratios.square().sum(),
        "ratio_max": torch.cat([ratios, ratios.new_zeros(1)]).max(),
        "mismatch_kl_sum": k3(current, q_logprobs=tokens.behaviour_logprobs).sum(),
        "by_lag": by_lag(tokens.lags, ratios, clipped=clipped, masked=corrected.masked),
        "ratios": ratios.clamp(max=LARGEST_RATIO).half(),
        "fates": torch.where(corrected.masked, LEFT_OUT, torch.where(clipped, CLIPPED, TRAINED)).to(torch.uint8),
    }


def _bound_sums(tokens: LossTokens, corrected: Correction, part: Surrogate) -> dict[str, Tensor]:
    """How many tokens and sequences were clipped, masked or capped."""
    ones = torch.ones_like(corrected.weights)
    of_sequence = tokens.sequences.sums(ones)
    wholly_masked = tokens.sequences.means(corrected.masked.to(ones.dtype)) == 1
    return {
        "num_clipped_high": ((tokens.advantages > 0) & part.held_back).float().sum(),
        "num_clipped_low": ((tokens.advantages < 0) & part.held_back).float().sum(),
        "num_masked": corrected.masked.float().sum(),
        "num_sequences": (ones / of_sequence).sum(),
        "num_masked_sequences": (wholly_masked / of_sequence).sum(),
    }


def _guard_sums(tokens: LossTokens, corrected: Correction, part: Surrogate) -> dict[str, Tensor]:
    """What the guard needs, after every clip, cap and mask."""
    weights = corrected.weights * part.weights * (tokens.advantages != 0)
    left = (~corrected.masked).to(weights.dtype)
    log_ratios = (tokens.current_logprobs.detach() - tokens.behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "num_weighed": (weights > 0).float().sum(),
        "weight_sum": weights.sum(),
        "weight_square_sum": weights.square().sum(),
        "left_log_ratio_sums": tokens.sequences.totals(left * log_ratios),
        "num_left_tokens": tokens.sequences.totals(left),
    }
