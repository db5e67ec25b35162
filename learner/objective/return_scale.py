"""The unit in which a critic predicts returns: a running mean and standard deviation of its targets.

A critic whose targets have mean 0 and deviation 1 learns at the same rate for any scale of rewards. MAPPO,
https://arxiv.org/abs/2103.01955, calls this value normalisation, and found that it matters in every task.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

DECAY = 0.95  # of earlier steps: about the last twenty count
MIN_STD = 1e-4  # so that returns that never differ are not amplified


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnScale:
    """Exponentially weighted sums over steps; before the first step the scale is the identity."""

    weight: float = 0.0
    mean_sum: float = 0.0
    square_sum: float = 0.0

    @property
    def mean(self) -> float:
        return self.mean_sum / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        if not self.weight:
            return 1.0
        return max(math.sqrt(max(self.square_sum / self.weight - self.mean**2, 0.0)), MIN_STD)

    def after(self, returns: Float[np.ndarray, " tokens"]) -> "ReturnScale":
        """The scale after adding the returns of a step.

            sum = DECAY * sum + (1 - DECAY) * mean over the step,   of 1, returns and returns^2
            mean = sum of returns / sum of 1,   std = sqrt(sum of squares / sum of 1 - mean^2)

        The division is Adam's bias correction: the first step counts fully.

        >>> scale = ReturnScale().after(np.array([1.0, 3.0]))
        >>> scale.mean, round(scale.std, 6)
        (2.0, 1.0)
        """
        gain = 1 - DECAY
        return ReturnScale(
            weight=DECAY * self.weight + gain,
            mean_sum=DECAY * self.mean_sum + gain * float(returns.mean()),
            square_sum=DECAY * self.square_sum + gain * float(np.square(returns).mean()),
        )

    def normalised(self, returns: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
        """Returns in the critic's unit: with mean 2 and std 4, 6 is 1."""
        return (returns - self.mean) / self.std

    def restored(self, values: Float[np.ndarray, " tokens"]) -> Float[np.ndarray, " tokens"]:
        """The critic's values in the unit of the reward: with mean 2 and std 4, 1 is 6."""
        return values * self.std + self.mean

    def tensor(self) -> Float64[Tensor, " 3"]:
        """The scale as a tensor for a checkpoint, without rounding."""
        return torch.tensor([self.weight, self.mean_sum, self.square_sum], dtype=torch.float64)


def scale_of(tensor: Float64[Tensor, " 3"]) -> ReturnScale:
    """The scale that `ReturnScale.tensor` wrote."""
    weight, mean_sum, square_sum = tensor.tolist()
    return ReturnScale(weight=weight, mean_sum=mean_sum, square_sum=square_sum)
