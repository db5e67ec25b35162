"""What one optimizer step measured: sums of each micro-batch in, numbers of the whole batch over all ranks out."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from learner.model.gradient import Update
from learner.loss import PolicyLoss
from learner.objective.value_loss import ValueLoss, ValueMetrics, value_metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What a step measured over all ranks; means and fractions are over its loss tokens, unless they say otherwise."""

    num_loss_tokens: int
    num_micro_batches: int  # of this rank
    loss: float  # as `objective.normalisation` divides it
    entropy: float  # nats
    mismatch_kl: float  # nats; 1e-3 is healthy
    reference_kl: float  # nats from the policy that RL began with; 0 where the objective does not ask
    ratio_mean: float
    ratio_std: float
    ratio_max: float
    effective_sample_size: float  # as a fraction of num_loss_tokens: 1 when every ratio is the same
    chi_square: float  # mean(ratio^2) - 1
    clip_fraction_high: float  # tokens of positive advantage that the surrogate held back
    clip_fraction_low: float  # tokens of negative advantage that the surrogate held back
    masked_fraction: float  # tokens that the correction left out
    masked_sequence_fraction: float  # of the sequences: those it left out whole
    truncated_fraction: float  # tokens whose behaviour weight was cut to its cap
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # a gradient was not finite or the guard refused the step, and nothing was updated
    guard_scale: float  # what the guard made of the learning rate: 1 is all of it, 0 is none
    values: ValueMetrics | None  # of the critic, where there is one


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a micro-batch gave, without gradient."""

    loss: PolicyLoss
    value_loss: ValueLoss | None
    entropy_sum: Tensor


def measured_over_ranks(parts: Sequence[Part]) -> dict[str, float]:
    """Every sum over all micro-batches of all ranks, and the largest ratio."""
    sums = {name: torch.stack([getattr(part.loss, name) for part in parts]).sum() for name in _SUMMED}
    total = summed_over_ranks(sums | {"entropy_sum": torch.stack([part.entropy_sum for part in parts]).sum()})
    return total | {"ratio_max": _largest(part.loss.ratio_max for part in parts)}


def step_metrics_of(
    measured: dict[str, float],
    update: Update,
    *,
    divisor: int,
    num_micro_batches: int,
    num_sequences: int,
    guard_scale: float,
    values: ValueMetrics | None,
) -> StepMetrics:
    """The metrics of a step, from what `measured_over_ranks` found in it."""
    num_loss_tokens = measured["num_loss_tokens"]
    mean = {name: value / num_loss_tokens for name, value in measured.items()}
    return StepMetrics(
        num_loss_tokens=round(num_loss_tokens),
        num_micro_batches=num_micro_batches,
        loss=measured["loss_sum"] / divisor,
        entropy=mean["entropy_sum"],
        mismatch_kl=mean["mismatch_kl_sum"],
        reference_kl=mean["reference_kl_sum"],
        ratio_mean=mean["ratio_sum"],
        ratio_std=math.sqrt(max(0.0, mean["ratio_square_sum"] - mean["ratio_sum"] ** 2)),
        ratio_max=measured["ratio_max"],
        effective_sample_size=mean["ratio_sum"] ** 2 / mean["ratio_square_sum"],
        chi_square=mean["ratio_square_sum"] - 1,
        clip_fraction_high=mean["num_clipped_high"],
        clip_fraction_low=mean["num_clipped_low"],
        masked_fraction=mean["num_masked"],
        masked_sequence_fraction=measured["num_masked_sequences"] / num_sequences,
        truncated_fraction=mean["num_truncated"],
        grad_norm=update.grad_norm,
        lr=update.lr,
        skipped=update.skipped,
        guard_scale=guard_scale,
        values=values,
    )


def critic_metrics_of(losses: Sequence[ValueLoss], update: Update) -> ValueMetrics:
    """What the critic's losses of all micro-batches of all ranks come to."""
    names = [item.name for item in dataclasses.fields(ValueLoss)]
    sums = {name: torch.stack([getattr(loss, name) for loss in losses]).sum() for name in names}
    return value_metrics(summed_over_ranks(sums), grad_norm=update.grad_norm, lr=update.lr)


_SUMMED = [field.name for field in dataclasses.fields(PolicyLoss) if field.name != "ratio_max"]


def summed_over_ranks(sums: dict[str, Tensor]) -> dict[str, float]:
    """Each sum, summed over the ranks as well, in one collective."""
    stacked = torch.stack([value.double() for value in sums.values()])
    dist.all_reduce(stacked)
    return dict(zip(sums, stacked.tolist(), strict=True))


def _largest(values: Iterable[Tensor]) -> float:
    largest = torch.stack(list(values)).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
