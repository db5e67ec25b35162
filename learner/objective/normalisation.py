"""Normalises the sum of the tokens' losses: a weight for each token, and one divisor for the whole batch.

    loss = sum over all tokens of all ranks of (weight * loss) / divisor

    tokens     every token of the batch has the same weight: DAPO, https://arxiv.org/abs/2503.14476
    sequences  every trajectory has the same weight, at any length: GRPO, https://arxiv.org/abs/2402.03300
    constant   every token has the same weight in every batch: Dr. GRPO, https://arxiv.org/abs/2503.20783

Two trajectories with losses (1, 1, 1) and (4): 7 / 4 by tokens, (1 + 4) / 2 by sequences, 7 / (2 * 8) with constant 8.
The result is the same if a chat template rewrote the history of the first one, so that it is two sequences, (1) and
(1, 1): what papers call a sequence is one attempt at a task. Masked tokens are included in every count.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.objective.ratio import Sequences


def token_weights(
    like: Float[Tensor, " tokens"], *, sequences: Sequences, objective: ObjectiveConfig
) -> Float[Tensor, " tokens"]:
    """The weight of each token, in the dtype of `like`: 1, or with "sequences" 1 / loss tokens in its trajectory."""
    ones = torch.ones_like(like)
    return ones / sequences.trajectory_tokens[sequences.ids] if objective.normalisation == "sequences" else ones


def loss_divisor(*, num_loss_tokens: int, num_trajectories: int, objective: ObjectiveConfig) -> int:
    """The divisor of the weighted sum over all ranks; the counts are of the whole batch, over all ranks.

    4 loss tokens in 2 trajectories: 4 by tokens, 2 by sequences, 16 with a constant of 8.
    """
    match objective.normalisation:
        case "tokens":
            return num_loss_tokens
        case "sequences":
            return num_trajectories
        case "constant":
            return num_trajectories * objective.normalisation_tokens
        case unknown:
            raise ValueError(f"unknown normalisation {unknown!r}")
