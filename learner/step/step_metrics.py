"""The metrics of one optimizer step: combines the sums of each micro-batch over the batch and all ranks."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.learner.model.gradient import Update
from slipstream.learner.objective.guard import Evidence, trajectory_ess
from slipstream.learner.objective.lag import LagMetrics, lag_metrics
from slipstream.learner.objective.value_loss import ValueLoss, ValueMetrics, value_metrics
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.loss import PolicyLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The metrics of a step over all ranks; means and fractions are over its loss tokens, unless noted otherwise."""

    num_loss_tokens: int
    num_micro_batches: int  # of this rank
    num_computed_tokens: int  # that passed through the policy: a prefix that sequences of a pack share counts once
    num_pairs: int  # of a computed token and a token that it attends to
    loss: float  # divided as `objective.normalisation` says
    entropy: float  # nats
    mismatch_kl: float  # nats; 1e-3 is healthy
    reference_kl: float  # nats from the reference policy; 0 if the objective has none
    ratio_mean: float
    ratio_std: float
    ratio_max: float
    trajectory_ratios: list[float]  # exp(mean log-ratio) of each trajectory, over the tokens that the correction kept
    effective_sample_size: float  # as a fraction of num_loss_tokens: 1 when every ratio is the same
    chi_square: float  # mean(ratio^2) - 1
    clip_fraction_high: float  # tokens of positive advantage that the surrogate clipped
    clip_fraction_low: float  # tokens of negative advantage that the surrogate clipped
    masked_fraction: float  # tokens that the correction masked
    masked_sequence_fraction: float  # fraction of the sequences whose every token is masked
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # nothing was updated: a gradient was not finite, or the guard skipped the step
    evidence: Evidence  # that the guard decided by
    weighed_fraction: float  # tokens with a gradient from the surrogate
    guard_scale: float  # the guard's factor for the learning rate: 1 keeps the step, 0 skips it
    by_lag: dict[str, LagMetrics]  # by bucket name; buckets without tokens are left out
    values: ValueMetrics | None  # of the critic; None without a critic
    losses: Sequence[PolicyLoss] = field(default=(), compare=False, repr=False)  # of this rank's micro-batches


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchSums:
    """The sums over one micro-batch, without gradient."""

    loss: PolicyLoss
    trajectories: Tensor  # of each of its sequences, by its number in the batch
    value_loss: ValueLoss | None
    entropy_sum: Tensor
    num_computed_tokens: int
    num_pairs: int


def trajectory_sums_over_ranks(
    micro_batches: Sequence[MicroBatchSums], *, num_trajectories: int, ranks: Ranks
) -> Tensor:
    """Log-ratio sums and token counts of each trajectory, over all its branches, packs and ranks. Collective."""
    sums = torch.zeros((2, num_trajectories), dtype=torch.float64, device=micro_batches[0].trajectories.device)
    for each in micro_batches:
        of_branches = torch.stack([each.loss.left_log_ratio_sums, each.loss.num_left_tokens])
        sums.index_add_(1, each.trajectories, of_branches.double())
    ranks.add_up(sums)
    return sums


def evidence_from(trajectory_sums: Tensor, measured: dict[str, float]) -> Evidence:
    """What the guard decides by: `measured` of the tokens, and the sums of `trajectory_sums_over_ranks`."""
    num, total = measured["num_weighed"], measured["weight_sum"]
    return Evidence(
        weight_mean=total / num if num else 1.0,
        token_ess=total**2 / measured["weight_square_sum"] / num if num else 1.0,
        trajectory_ess=trajectory_ess(trajectory_sums[0], num_tokens=trajectory_sums[1]),
    )


def ratios_of(trajectory_sums: Tensor) -> list[float]:
    """exp(mean log-ratio) of each trajectory with tokens that the correction kept."""
    # Filtered on the host: an index by a mask would make it wait for a GPU twice.
    ratios, counts = torch.stack([(trajectory_sums[0] / trajectory_sums[1]).exp(), trajectory_sums[1]]).tolist()
    return [ratio for ratio, num_tokens in zip(ratios, counts, strict=True) if num_tokens]


def measured_over_ranks(micro_batches: Sequence[MicroBatchSums], *, ranks: Ranks) -> dict[str, float]:
    """Every sum over all micro-batches of all ranks, and the largest ratio. Collective."""
    sums = {name: torch.stack([getattr(each.loss, name) for each in micro_batches]).sum() for name in _SUMMED}
    sums["entropy_sum"] = torch.stack([each.entropy_sum for each in micro_batches]).sum()
    for name in ("num_computed_tokens", "num_pairs"):
        total = sum(getattr(each, name) for each in micro_batches)
        sums[name] = torch.full_like(sums["entropy_sum"], total, dtype=torch.float64)
    largest = torch.stack([each.loss.ratio_max for each in micro_batches]).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return ranks.summed(sums) | {"ratio_max": float(largest)}


def token_metrics(measured: dict[str, float], *, divisor: int) -> dict[str, Any]:
    """The fields of `StepMetrics` that follow from the sums of `measured_over_ranks`."""
    num_loss_tokens = measured["num_loss_tokens"]
    mean = {name: value / num_loss_tokens for name, value in measured.items()}
    return {
        "num_loss_tokens": round(num_loss_tokens),
        "num_computed_tokens": round(measured["num_computed_tokens"]),
        "num_pairs": round(measured["num_pairs"]),
        "loss": measured["loss_sum"] / divisor,
        "entropy": mean["entropy_sum"],
        "mismatch_kl": mean["mismatch_kl_sum"],
        "reference_kl": mean["reference_kl_sum"],
        "ratio_mean": mean["ratio_sum"],
        "ratio_std": math.sqrt(max(0.0, mean["ratio_square_sum"] - mean["ratio_sum"] ** 2)),
        "ratio_max": measured["ratio_max"],
        "effective_sample_size": mean["ratio_sum"] ** 2 / mean["ratio_square_sum"],
        "chi_square": mean["ratio_square_sum"] - 1,
        "clip_fraction_high": mean["num_clipped_high"],
        "clip_fraction_low": mean["num_clipped_low"],
        "masked_fraction": mean["num_masked"],
        "masked_sequence_fraction": measured["num_masked_sequences"] / measured["num_sequences"],
        "weighed_fraction": mean["num_weighed"],
    }


def critic_metrics_of(losses: Sequence[ValueLoss], update: Update, *, ranks: Ranks) -> ValueMetrics:
    """The critic's metrics over all micro-batches of all ranks. Collective."""
    names = [item.name for item in dataclasses.fields(ValueLoss)]
    sums = {name: torch.stack([getattr(loss, name) for loss in losses]).sum() for name in names}
    return value_metrics(ranks.summed(sums), grad_norm=update.grad_norm, lr=update.lr)


_NOT_SUMMED = ("ratio_max", "left_log_ratio_sums", "num_left_tokens", "by_lag", "ratios", "fates")
_SUMMED = [field.name for field in dataclasses.fields(PolicyLoss) if field.name not in _NOT_SUMMED]


def lag_metrics_of(micro_batches: Sequence[MicroBatchSums], *, ranks: Ranks) -> dict[str, LagMetrics]:
    """The metrics of each bucket of lag, over all micro-batches of all ranks. Collective."""
    sums = torch.stack([each.loss.by_lag for each in micro_batches]).sum(dim=0).double()
    ranks.add_up(sums)
    return lag_metrics(sums.tolist())
