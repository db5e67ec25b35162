"""One optimizer step: forward and backward over the micro-batches, then one clipped update."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from common.config import ObjectiveConfig
from learner.loss import PolicyLoss, policy_loss
from learner.model import PackedModel
from learner.pack import Packed
from learner.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What a step measured over all ranks; means are over its loss tokens."""

    num_loss_tokens: int
    num_micro_batches: int  # of this rank
    loss: float
    entropy: float  # nats
    mismatch_kl: float  # nats; 1e-3 is healthy
    ratio_mean: float
    ratio_std: float
    ratio_max: float
    effective_sample_size: float  # as a fraction of num_loss_tokens: 1 when every ratio is the same
    chi_square: float  # mean(ratio^2) - 1
    clip_fraction_high: float  # tokens of positive advantage that the clip stopped
    clip_fraction_low: float  # tokens of negative advantage that the clip stopped
    masked_fraction: float  # tokens that the correction left out
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # the gradient was not finite, and nothing was updated


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What became of one optimizer step."""

    grad_norm: float
    lr: float
    skipped: bool


def train_step(
    model: PackedModel,
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    micro_batches: Sequence[Packed],
    *,
    ranks: Ranks,
    objective: ObjectiveConfig,
    global_num_loss_tokens: int,
    temperature: float,
    chunk_tokens: int,
    max_grad_norm: float,
) -> StepMetrics:
    """Make one optimizer step on this rank's `micro_batches`; all ranks call it with the same number of them.

        loss = sum over all loss tokens of all ranks / global_num_loss_tokens

    A gradient that is not finite leaves the weights, the optimizer and the schedule as they were, and says so.
    Raises ValueError for a batch without loss tokens.
    """
    if global_num_loss_tokens < 1:
        raise ValueError(f"a step needs loss tokens, got {global_num_loss_tokens}; were all groups dropped?")
    losses, entropy_sum = [], torch.zeros((), device=ranks.device)
    for packed in micro_batches:
        packed = packed.to(ranks.device)
        current = model(packed, temperature=temperature, chunk_tokens=chunk_tokens)
        loss = policy_loss(
            current.logprobs,
            packed.behaviour_logprobs[packed.loss_mask],
            packed.advantages[packed.loss_mask],
            objective=objective,
        )
        backward(loss.loss_sum, ranks=ranks, global_num_loss_tokens=global_num_loss_tokens)
        losses.append(_without_gradient(loss))
        entropy_sum += current.entropies.sum()
    update = apply_gradient(model, optimizer, schedule, max_grad_norm=max_grad_norm)
    return _step_metrics(losses, entropy_sum, update)


def backward(loss_sum: Tensor, *, ranks: Ranks, global_num_loss_tokens: int) -> None:
    """Add this micro-batch's part of the gradient of the mean over `global_num_loss_tokens`."""
    # FSDP averages gradients over the ranks where a sum is wanted: num_ranks undoes that, here and nowhere else.
    torch.autograd.backward(loss_sum * (ranks.num_ranks / global_num_loss_tokens))


def apply_gradient(
    model: PackedModel, optimizer: torch.optim.Optimizer, schedule: LambdaLR, *, max_grad_norm: float
) -> Update:
    """Clip the gradient to a global norm of `max_grad_norm`, update, move the schedule on, and forget the gradient."""
    lr = float(optimizer.param_groups[0]["lr"])
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    # Whole, so that every rank sees the same norm and takes the same decision.
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    grad_norm = float(norm)
    finite = math.isfinite(grad_norm)
    if finite:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        optimizer.step()
        schedule.step()
    optimizer.zero_grad(set_to_none=True)
    return Update(grad_norm=grad_norm, lr=lr, skipped=not finite)


def _without_gradient(loss: PolicyLoss) -> PolicyLoss:
    return dataclasses.replace(loss, loss_sum=loss.loss_sum.detach())


def _step_metrics(losses: Sequence[PolicyLoss], entropy_sum: Tensor, update: Update) -> StepMetrics:
    total = summed_over_ranks({name: torch.stack([getattr(loss, name) for loss in losses]).sum() for name in _SUMMED}
                        | {"entropy_sum": entropy_sum})  # fmt: skip
    num_loss_tokens = total["num_loss_tokens"]
    mean = {name: value / num_loss_tokens for name, value in total.items()}
    return StepMetrics(
        num_loss_tokens=round(num_loss_tokens),
        num_micro_batches=len(losses),
        loss=mean["loss_sum"],
        entropy=mean["entropy_sum"],
        mismatch_kl=mean["mismatch_kl_sum"],
        ratio_mean=mean["ratio_sum"],
        ratio_std=math.sqrt(max(0.0, mean["ratio_square_sum"] - mean["ratio_sum"] ** 2)),
        ratio_max=_largest(loss.ratio_max for loss in losses),
        effective_sample_size=mean["ratio_sum"] ** 2 / mean["ratio_square_sum"],
        chi_square=mean["ratio_square_sum"] - 1,
        clip_fraction_high=mean["num_clipped_high"],
        clip_fraction_low=mean["num_clipped_low"],
        masked_fraction=mean["num_masked"],
        grad_norm=update.grad_norm,
        lr=update.lr,
        skipped=update.skipped,
    )


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
