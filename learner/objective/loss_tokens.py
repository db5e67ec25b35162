"""What the loss and its parts read of each token."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from slipstream.learner.objective.ratio import Sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTokens:
    """What the loss reads: one number for each loss token of a pack. Current and entropies have gradients."""

    current_logprobs: Float[Tensor, " tokens"]
    behaviour_logprobs: Float[Tensor, " tokens"]
    reference_logprobs: Float[Tensor, " tokens"] | None = None  # with them, the loss has a KL divergence
    advantages: Float[Tensor, " tokens"]
    entropies: Float[Tensor, " tokens"]
    lags: Int[Tensor, " tokens"]
    sequences: Sequences
