"""What the sum of the tokens' losses is divided by: a weight a token, and one divisor for the whole batch.

    loss = sum over all tokens of all ranks of (weight * loss) / divisor

    tokens     every token of the batch weighs the same: DAPO, https://arxiv.org/abs/2503.14476
    sequences  every sequence weighs the same, however long: GRPO, https://arxiv.org/abs/2402.03300
    constant   every token weighs the same, whatever else is in the batch: Dr. GRPO, https://arxiv.org/abs/2503.20783

Two sequences with losses (1, 1, 1) and (4): 7 / 4 by tokens, (1 + 4) / 2 by sequences, 7 / (2 * 8) with constant 8.
Masked tokens keep their place in every count.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from common.objective_config import ObjectiveConfig
from learner.objective.ratio import Sequences


def token_weights(
    like: Float[Tensor, " tokens"], *, sequences: Sequences, objective: ObjectiveConfig
) -> Float[Tensor, " tokens"]:
    """The weight of each token, in the dtype of `like`: 1, or with "sequences" 1 / loss tokens in its sequence."""
    ones = torch.ones_like(like)
    return 1 / sequences.sums(ones) if objective.normalisation == "sequences" else ones


def loss_divisor(*, num_loss_tokens: int, num_sequences: int, objective: ObjectiveConfig) -> int:
    """What the weighed sum over all ranks is divided by; the counts are of the whole batch, over all ranks.

    4 loss tokens in 2 sequences: 4 by tokens, 2 by sequences, 16 with a constant of 8.
    """
    match objective.normalisation:
        case "tokens":
            return num_loss_tokens
        case "sequences":
            return num_sequences
        case "constant":
            return num_sequences * objective.normalisation_tokens
        case unknown:
            raise ValueError(f"no normalisation {unknown!r}")
