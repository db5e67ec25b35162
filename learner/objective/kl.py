"""Estimates of a KL divergence from the tokens that one of the two policies sampled: Schulman's k1, k2 and k3.

http://joschu.net/blog/kl-approx.html. With x sampled from q and log_ratio = log p(x) - log q(x), all three estimate
KL(q || p) in nats: k1 and k3 without bias, k2 with a small one; k1 may be negative and scatters most.
"""

from jaxtyping import Float
from torch import Tensor

from learner.objective.ratio import ratio


def k1(p_logprobs: Float[Tensor, " tokens"], q_logprobs: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """KL(q || p) as the log-ratio itself.

        k1 = -log(ratio),  ratio = p / q

    A ratio of 2 gives -0.693, of 0.5 gives 0.693.
    """
    return q_logprobs - p_logprobs


def k2(p_logprobs: Float[Tensor, " tokens"], q_logprobs: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """KL(q || p) as half the square of the log-ratio, never below 0.

        k2 = log(ratio)^2 / 2,  ratio = p / q

    A ratio of 2 or of 0.5 gives 0.240. As a loss, its gradient is that of the divergence itself, where k3's is that of
    the reverse one: https://arxiv.org/abs/2510.01555.
    """
    return (p_logprobs - q_logprobs).square() / 2


def k3(p_logprobs: Float[Tensor, " tokens"], q_logprobs: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """KL(q || p), never below 0.

        k3 = ratio - 1 - log(ratio),  ratio = p / q

    A ratio of 2 gives 0.307, of 0.5 gives 0.193, of 1 gives 0.
    """
    return ratio(p_logprobs, q_logprobs) - 1 - (p_logprobs - q_logprobs)
