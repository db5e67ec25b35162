"""One optimizer step: forward and backward over the micro-batches, then one clipped update."""

import dataclasses
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from common.objective_config import ObjectiveConfig
from learner.clock import Clock
from learner.critic import Critic, critic_loss
from learner.guard import judge
from learner.loss import PolicyLoss, policy_loss
from learner.model import PackedModel, expect_backward
from learner.normalisation import loss_divisor
from learner.pack import Packed
from learner.ranks import Ranks
from learner.value_loss import ValueLoss, ValueMetrics, value_metrics

log = logging.getLogger(__name__)


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
    reference: PackedModel | None,
    critic: Critic | None = None,
    critic_only: bool = False,
    ranks: Ranks,
    objective: ObjectiveConfig,
    global_num_loss_tokens: int,
    global_num_sequences: int,
    temperature: float,
    chunk_tokens: int,
    max_grad_norm: float,
    clock: Clock | None = None,
) -> StepMetrics:
    """Make one optimizer step on this rank's `micro_batches`; all ranks call it with the same number of them.

        loss = sum over all loss tokens of all ranks / divisor    (see `learner.normalisation`)
        critic's loss = sum over all loss tokens of all ranks / their number    (see `learner.value_loss`)

    A gradient that is not finite, or a batch that the guard refuses (see `learner.guard`), leaves the weights, the
    optimizers and the schedules as they were, the critic's like the policy's, and says so.
    `reference` is the frozen policy that the loss's KL divergence is to, None where it has none. With `critic_only` the
    policy, its optimizer and its schedule stay as they are. On `clock`, "forward", "backward" and "optimizer" are
    lapped.
    Raises ValueError for a batch without loss tokens.
    """
    if global_num_loss_tokens < 1:
        raise ValueError(f"a step needs loss tokens, got {global_num_loss_tokens}; were all groups dropped?")
    divisor = loss_divisor(
        num_loss_tokens=global_num_loss_tokens, num_sequences=global_num_sequences, objective=objective
    )
    found = []
    for number, packed in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        expect_backward(model, last=last)
        if critic is not None and isinstance(critic.module, PackedModel):
            expect_backward(critic.module, last=last)
        found.append(
            _forward_and_backward(
                model,
                packed.to(ranks.device),
                reference=reference,
                critic=critic,
                ranks=ranks,
                objective=objective,
                temperature=temperature,
                chunk_tokens=chunk_tokens,
                divisor=divisor,
                num_loss_tokens=global_num_loss_tokens,
                clock=clock,
            )
        )
    measured = _measured(found)
    ratio_sum, num_loss_tokens = measured["ratio_sum"], measured["num_loss_tokens"]
    verdict = judge(
        effective_sample_size=ratio_sum**2 / measured["ratio_square_sum"] / num_loss_tokens,
        ratio_mean=ratio_sum / num_loss_tokens,
        objective=objective,
    )
    if verdict.reason and ranks.rank == 0:
        log.warning("guard: step scaled by %.3g: %s", verdict.scale, verdict.reason)
    optimizers = [optimizer] if critic is None else [optimizer, critic.optimizer]
    finite = all(math.isfinite(float(gradient_norm(each))) for each in optimizers)
    scale = verdict.scale if finite else 0.0
    policy_scale = 0.0 if critic_only else scale
    update = apply_gradient(optimizer, schedule, max_grad_norm=max_grad_norm, scale=policy_scale)
    values = None
    if critic is not None:
        critic_update = apply_gradient(critic.optimizer, critic.schedule, max_grad_norm=max_grad_norm, scale=scale)
        values = _value_metrics([part.value_loss for part in found if part.value_loss is not None], critic_update)
    _lap(clock, "optimizer")
    return _step_metrics(
        measured,
        dataclasses.replace(update, skipped=scale == 0.0),
        divisor=divisor,
        num_micro_batches=len(micro_batches),
        num_sequences=global_num_sequences,
        guard_scale=verdict.scale,
        values=values,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What a micro-batch gave, without gradient."""

    loss: PolicyLoss
    value_loss: ValueLoss | None
    entropy_sum: Tensor


def _forward_and_backward(
    model: PackedModel,
    packed: Packed,
    *,
    reference: PackedModel | None,
    critic: Critic | None,
    ranks: Ranks,
    objective: ObjectiveConfig,
    temperature: float,
    chunk_tokens: int,
    divisor: int,
    num_loss_tokens: int,
    clock: Clock | None,
) -> _Part:
    """Add this micro-batch's part to the gradients of policy and critic."""
    current = model(
        packed, temperature=temperature, chunk_tokens=chunk_tokens, entropy_gradient=objective.entropy_bonus > 0
    )  # fmt: skip
    loss = policy_loss(
        current.logprobs,
        # One optimizer step a batch: the learner at the start of the step is the current policy, without gradient.
        current.logprobs.detach(),
        packed.behaviour_logprobs[packed.loss_mask],
        packed.advantages[packed.loss_mask],
        current.entropies,
        None if reference is None else _frozen_logprobs(reference, packed, temperature, chunk_tokens),
        sequences=packed.loss_sequences,
        objective=objective,
    )
    loss_sums, value_loss = [loss.loss_sum], None
    if critic is not None:
        value_loss = critic_loss(critic, packed, current, value_clip=objective.value_clip)
        value_sum = value_loss.loss_sum * (divisor / num_loss_tokens)  # a mean over tokens, whatever the policy's is
        if critic.is_shared:  # one graph, one backward pass
            loss_sums = [loss.loss_sum + objective.value_coefficient * value_sum]
        else:
            loss_sums = [value_sum, loss.loss_sum]
    _lap(clock, "forward")
    for loss_sum in loss_sums:
        backward(loss_sum, ranks=ranks, divisor=divisor)
    _lap(clock, "backward")
    return _Part(
        loss=_without_gradient(loss),
        value_loss=None if value_loss is None else _without_gradient(value_loss),
        entropy_sum=current.entropies.detach().sum(),
    )


def backward(loss_sum: Tensor, *, ranks: Ranks, divisor: float) -> None:
    """Add this micro-batch's part of the gradient of the sum over all ranks, divided by `divisor`."""
    # FSDP averages gradients over the ranks where a sum is wanted: num_ranks undoes that, here and nowhere else.
    torch.autograd.backward(loss_sum * (ranks.num_ranks / divisor))


def gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """The global norm of the gradient of all that `optimizer` moves: whole, the same on every rank. Collective."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in _parameters(optimizer) if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def apply_gradient(
    optimizer: torch.optim.Optimizer, schedule: LambdaLR, *, max_grad_norm: float, scale: float = 1.0
) -> Update:
    """Clip the gradient to a global norm of `max_grad_norm`, update, move the schedule on, and forget the gradient.

    `scale` is of the learning rate, for this update only; 0, like a gradient that is not finite, changes nothing.
    """
    lr = float(optimizer.param_groups[0]["lr"]) * scale
    norm = gradient_norm(optimizer)
    grad_norm = float(norm)
    updates = math.isfinite(grad_norm) and scale > 0
    if updates:
        torch.nn.utils.clip_grads_with_norm_(_parameters(optimizer), max_grad_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] *= scale
        optimizer.step()
        schedule.step()  # sets the next step's learning rate anew, from the schedule alone
    optimizer.zero_grad(set_to_none=True)
    return Update(grad_norm=grad_norm, lr=lr, skipped=not updates)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _lap(clock: Clock | None, name: str) -> None:
    if clock:
        clock.lap(name)


def _frozen_logprobs(reference: PackedModel, packed: Packed, temperature: float, chunk_tokens: int) -> Tensor:
    with torch.no_grad():
        logprobs: Tensor = reference(packed, temperature=temperature, chunk_tokens=chunk_tokens).logprobs
    return logprobs


L = TypeVar("L", PolicyLoss, ValueLoss)


def _without_gradient(loss: L) -> L:
    return dataclasses.replace(loss, loss_sum=loss.loss_sum.detach())


def _measured(parts: Sequence[_Part]) -> dict[str, float]:
    """Every sum over all micro-batches of all ranks, and the largest ratio."""
    sums = {name: torch.stack([getattr(part.loss, name) for part in parts]).sum() for name in _SUMMED}
    total = summed_over_ranks(sums | {"entropy_sum": torch.stack([part.entropy_sum for part in parts]).sum()})
    return total | {"ratio_max": _largest(part.loss.ratio_max for part in parts)}


def _step_metrics(
    measured: dict[str, float],
    update: Update,
    *,
    divisor: int,
    num_micro_batches: int,
    num_sequences: int,
    guard_scale: float,
    values: ValueMetrics | None,
) -> StepMetrics:
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


def _value_metrics(losses: Sequence[ValueLoss], update: Update) -> ValueMetrics:
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
