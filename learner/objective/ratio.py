"""Probability ratios of two policies on sampled tokens: by token, or over a whole sequence."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# exp(20) is 5e8: larger than any useful ratio, but its square still fits in float32. Beyond, inf * 0 would be NaN.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Which sequence each loss token belongs to: a whole trajectory, or one branch of it if its history was rewritten.

    Three loss tokens, the last one of another sequence: ids (0, 0, 1), num 2. If both sequences are branches of the
    batch's sixth trajectory: trajectories (5, 5), trajectory_tokens (3, 3).
    """

    ids: Int[Tensor, " tokens"]  # in [0, num)
    num: int  # on the host, so that no kernel waits for it; includes sequences without loss tokens
    trajectories: Int[Tensor, " sequences"]  # the number of each sequence's trajectory in the batch
    trajectory_tokens: Int[Tensor, " sequences"]  # loss tokens of that trajectory, including those in other packs

    def sums(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
        """For each token the sum over its sequence: 1, 3, 5 with ids (0, 0, 1) give 4, 4, 5."""
        return self.totals(values)[self.ids]

    def totals(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " sequences"]:
        """The sum over each sequence: 1, 3, 5 with ids (0, 0, 1) give 4, 5."""
        return values.new_zeros(self.num).index_add(0, self.ids, values)

    def means(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
        """For each token the mean over its sequence: 1, 3, 5 with ids (0, 0, 1) give 2, 2, 5."""
        return self.sums(values) / self.sums(torch.ones_like(values))


def ratio(
    current_logprobs: Float[Tensor, " tokens"], *, other_logprobs: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """How many times more likely each token is under the current policy.

        ratio = exp(current - other)

    A token of probability 0.3 then and 0.6 now has ratio 2.
    """
    return torch.exp((current_logprobs - other_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def geometric_ratio(
    current_logprobs: Float[Tensor, " tokens"], *, other_logprobs: Float[Tensor, " tokens"], sequences: Sequences
) -> Float[Tensor, " tokens"]:
    """The geometric mean of a sequence's ratios; the same for each of its tokens.

        ratio = exp(mean over the sequence of (current - other))

    Two tokens of ratios 4 and 1 make a sequence of ratio 2, ten tokens of 1.1 one of 1.1.
    """
    return torch.exp(sequences.means(current_logprobs - other_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
