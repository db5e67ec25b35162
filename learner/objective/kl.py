"""An estimate of a KL divergence from sampled tokens, and a loss that keeps a policy near another."""

from jaxtyping import Float
from torch import Tensor

from slipstream.learner.objective.ratio import ratio

# The largest weight of a token in `reference_divergence`: also the default bound of masks and capped weights.
MAX_KL_WEIGHT = 5.0


def k3(p_logprobs: Float[Tensor, " tokens"], *, q_logprobs: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Estimate KL(q || p) in nats from samples of q, without bias, by a number that is never below 0.

    Schulman's k3, http://joschu.net/blog/kl-approx.html:

        k3 = ratio - 1 - log(ratio),  ratio = p / q

    A ratio of 2 gives 0.307, of 0.5 gives 0.193, of 1 gives 0.
    """
    return ratio(p_logprobs, other_logprobs=q_logprobs) - 1 - (p_logprobs - q_logprobs)


def reference_divergence(
    current_logprobs: Float[Tensor, " tokens"],
    *,
    behaviour_logprobs: Float[Tensor, " tokens"],
    reference_logprobs: Float[Tensor, " tokens"],
) -> Float[Tensor, " tokens"]:
    """KL(current || reference) as a loss on tokens of an older policy; its mean is exact at any lag.

    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556 (eq. 7), with a bound:

        weight   = min(current / behaviour, 5)
        value    = weight * k3(reference, current)
        gradient = weight * log(current / reference) * gradient of log(current)

    Why it is exact: the divergence is the mean of log(current / reference) over samples of the current policy, so its
    gradient is the mean of log(current / reference) * gradient of log(current). The weight turns a mean over samples of
    behaviour into one over samples of current. The paper gets the same gradient by also differentiating its weight;
    here the result is computed directly, because float32 loses it in the sum if reference / current is large.

    A token above the bound keeps its gradient, with a weight of 5. The masks of
    `slipstream.learner.objective.correction` do not apply here: the divergence brings back a policy that went too far.

    A token of probability 0.2 under behaviour, 0.4 under current and 0.1 under reference: a weight of 2, a value of
    2 * (0.25 - 1 + 1.386) = 1.273, and a gradient of 2 * 1.386 = 2.773 to its log-probability.
    """
    current = current_logprobs.detach()
    weights = ratio(current, other_logprobs=behaviour_logprobs).clamp(max=MAX_KL_WEIGHT)
    slopes = weights * (current - reference_logprobs)
    no_value = current_logprobs - current
    return weights * k3(reference_logprobs, q_logprobs=current) + slopes * no_value
