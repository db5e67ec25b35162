"""What a critic minimises: the squared distance of its values to the returns, clipped as PPO clips them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """The loss and what was measured on the way, summed over loss tokens, in the critic's own unit."""

    loss_sum: Float[Tensor, ""]  # with gradient
    num_loss_tokens: Float[Tensor, ""]
    num_clipped: Float[Tensor, ""]  # where the clipped error is the larger one: these have no gradient
    value_sum: Float[Tensor, ""]
    return_sum: Float[Tensor, ""]
    return_square_sum: Float[Tensor, ""]
    missed_sum: Float[Tensor, ""]  # of returns - old_values
    missed_square_sum: Float[Tensor, ""]


def value_loss(
    values: Float[Tensor, " tokens"],
    old_values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    *,
    value_clip: float,
) -> ValueLoss:
    """PPO's value loss, https://arxiv.org/abs/1707.06347, clipped as in OpenAI's baselines, TRL and verl.

        clipped = clip(values, old_values - value_clip, old_values + value_clip)
        loss = max((values - returns)^2, (clipped - returns)^2) / 2

    A `value_clip` of 0 is off. With 0.2: a value that moved from 0 to 0.5, and should be 1, is at 0.2 for the loss,
    which is (0.2 - 1)^2 / 2 = 0.32 and has no gradient; one that should be 0.1 gives (0.5 - 0.1)^2 / 2 = 0.08.
    """
    errors = (values - returns).square()
    clipped = torch.zeros_like(errors, dtype=torch.bool)
    if value_clip:
        bounded = old_values + (values - old_values).clamp(-value_clip, value_clip)
        bounded_errors = (bounded - returns).square()
        clipped = bounded_errors > errors
        errors = torch.maximum(errors, bounded_errors)
    missed = returns - old_values
    return ValueLoss(
        loss_sum=errors.sum() / 2,
        num_loss_tokens=torch.ones_like(errors).sum(),
        num_clipped=clipped.float().sum(),
        value_sum=values.detach().sum(),
        return_sum=returns.sum(),
        return_square_sum=returns.square().sum(),
        missed_sum=missed.sum(),
        missed_square_sum=missed.square().sum(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueMetrics:
    """What a step measured of the critic, over all loss tokens; in its own unit, as `learner.return_scale` has it."""

    loss: float
    clip_fraction: float  # tokens whose value moved further than `objective.value_clip` allows, and was held back
    explained_variance: float  # of the returns, by the values before the step: 1 is all, 0 is what a constant explains
    mean: float
    return_mean: float
    grad_norm: float  # before clipping
    lr: float


def value_metrics(totals: Mapping[str, float], *, grad_norm: float, lr: float) -> ValueMetrics:
    """What the fields of `ValueLoss`, summed over a whole batch, say of it.

        explained_variance = 1 - var(returns - old_values) / var(returns),   0 where returns never differ

    Returns of 1 and 3 that were expected to be 1 and 2: 1 - 0.25 / 1 = 0.75.
    """
    mean = {name: total / totals["num_loss_tokens"] for name, total in totals.items()}
    return_variance = mean["return_square_sum"] - mean["return_sum"] ** 2
    missed_variance = mean["missed_square_sum"] - mean["missed_sum"] ** 2
    return ValueMetrics(
        loss=mean["loss_sum"],
        clip_fraction=mean["num_clipped"],
        explained_variance=1 - missed_variance / return_variance if return_variance > 0 else 0.0,
        mean=mean["value_sum"],
        return_mean=mean["return_sum"],
        grad_norm=grad_norm,
        lr=lr,
    )
