"""The critic's loss: the squared distance of its values to the returns."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """The loss, and sums over loss tokens for metrics, in the critic's unit."""

    loss_sum: Float[Tensor, ""]  # with gradient
    num_loss_tokens: Float[Tensor, ""]
    value_sum: Float[Tensor, ""]
    return_sum: Float[Tensor, ""]
    return_square_sum: Float[Tensor, ""]
    missed_sum: Float[Tensor, ""]  # of returns - old_values
    missed_square_sum: Float[Tensor, ""]


def value_loss(
    values: Float[Tensor, " tokens"], *, old_values: Float[Tensor, " tokens"], returns: Float[Tensor, " tokens"]
) -> ValueLoss:
    """The value loss of actor-critic methods, https://arxiv.org/abs/1506.02438.

        loss = (values - returns)^2 / 2

    A value of 0.5 that should be 1 gives 0.125, and a gradient of -0.5. `old_values`, those before the step, are used
    only for metrics. There is no clip around them as in PPO: a batch makes one step, so they are equal to `values`.
    """
    errors = (values - returns).square()
    missed = returns - old_values
    return ValueLoss(
        loss_sum=errors.sum() / 2,
        num_loss_tokens=torch.ones_like(errors).sum(),
        value_sum=values.detach().sum(),
        return_sum=returns.sum(),
        return_square_sum=returns.square().sum(),
        missed_sum=missed.sum(),
        missed_square_sum=missed.square().sum(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueMetrics:
    """The critic's metrics of a step, over all loss tokens, in its unit (see `return_scale`)."""

    loss: float
    explained_variance: float  # of the returns, by the values before the step: 1 is perfect, 0 is as good as a constant
    mean: float
    return_mean: float
    grad_norm: float  # before clipping
    lr: float


def value_metrics(totals: Mapping[str, float], *, grad_norm: float, lr: float) -> ValueMetrics:
    """The critic's metrics, from the fields of `ValueLoss` summed over a whole batch.

        explained_variance = 1 - var(returns - old_values) / var(returns),   0 if all returns are equal

    Returns of 1 and 3 that were predicted as 1 and 2: 1 - 0.25 / 1 = 0.75.
    """
    mean = {name: total / totals["num_loss_tokens"] for name, total in totals.items()}
    return_variance = mean["return_square_sum"] - mean["return_sum"] ** 2
    missed_variance = mean["missed_square_sum"] - mean["missed_sum"] ** 2
    return ValueMetrics(
        loss=mean["loss_sum"],
        explained_variance=1 - missed_variance / return_variance if return_variance > 0 else 0.0,
        mean=mean["value_sum"],
        return_mean=mean["return_sum"],
        grad_norm=grad_norm,
        lr=lr,
    )
