"""One optimizer step: forward and backward over the micro-batches, then one clipped update."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from common.objective_config import ObjectiveConfig
from learner.clock import Clock
from learner.loss import LossTokens, PolicyLoss, policy_loss
from learner.model.critic import Critic, critic_loss
from learner.model.gradient import apply_gradient, backward, gradient_norm
from learner.model.packed_model import PackedModel, expect_backward
from learner.objective.guard import Evidence, GuardDecision, decide
from learner.objective.normalisation import loss_divisor
from learner.objective.value_loss import ValueLoss, ValueMetrics
from learner.pack import Packed
from learner.ranks import Ranks
from learner.step_metrics import (
    MicroBatchSums,
    StepMetrics,
    critic_metrics_of,
    evidence_over_ranks,
    lag_metrics_of,
    measured_over_ranks,
    step_metrics_of,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """The settings of `train_step`, which are the same for every step of a run."""

    objective: ObjectiveConfig
    max_lag: int = 0  # optimizer steps; tokens that lag by more are masked
    max_grad_norm: float


def train_step(
    model: PackedModel,
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    micro_batches: Sequence[Packed],
    *,
    settings: StepSettings,
    reference: PackedModel | None,
    proximal_logprobs: Sequence[Tensor] | None = None,
    critic: Critic | None = None,
    critic_only: bool = False,
    ranks: Ranks,
    global_num_loss_tokens: int,
    global_num_trajectories: int,
    clock: Clock | None = None,
) -> StepMetrics:
    """Make one optimizer step on this rank's `micro_batches`; all ranks call it with the same number of them.

        loss = sum over all loss tokens of all ranks / divisor    (see `learner.objective.normalisation`)
        critic's loss = sum over all loss tokens of all ranks / their number    (see `learner.objective.value_loss`)

    If a gradient is not finite, or the guard skips the batch (see `learner.objective.guard`), neither policy nor critic
    changes, nor do their optimizers and schedules; the metrics have `skipped`. `reference` is the frozen policy of the
    loss's KL divergence, None if the loss has none. `proximal_logprobs` has a tensor for each micro-batch, None if the
    objective has no proximal policy. With `critic_only` the policy, its optimizer and its schedule do not change.
    `clock` times "forward", "backward" and "optimizer". Raises ValueError for a batch without loss tokens.
    """
    if global_num_loss_tokens < 1:
        raise ValueError(f"a step needs at least 1 loss token, got {global_num_loss_tokens}; were all groups dropped?")
    divisor = loss_divisor(
        num_loss_tokens=global_num_loss_tokens, num_trajectories=global_num_trajectories, objective=settings.objective
    )
    proximal: Sequence[Tensor | None] = proximal_logprobs or [None] * len(micro_batches)
    found = []
    for packed, logprobs in zip(_announced(micro_batches, model, critic), proximal, strict=True):
        sums, loss_sums = _forward(
            model,
            packed.to(ranks.device),
            settings=settings,
            proximal_logprobs=logprobs,
            reference=reference,
            critic=critic,
            value_weight=divisor / global_num_loss_tokens,
        )
        _lap(clock, "forward")
        for loss_sum in loss_sums:
            backward(loss_sum, ranks=ranks, divisor=divisor)
        _lap(clock, "backward")
        found.append(sums)
    measured = measured_over_ranks(found)
    evidence = evidence_over_ranks(found, measured, num_trajectories=global_num_trajectories)
    decision = _guard_decision(evidence, objective=settings.objective, ranks=ranks)
    scale = decision.scale if critic is None or _both_finite(optimizer, critic) else 0.0
    policy_scale = 0.0 if critic_only else scale
    update = apply_gradient(optimizer, schedule, max_grad_norm=settings.max_grad_norm, scale=policy_scale)
    values = _critic_stepped(critic, found, max_grad_norm=settings.max_grad_norm, scale=scale)
    _lap(clock, "optimizer")
    return step_metrics_of(
        measured,
        dataclasses.replace(update, skipped=update.skipped if critic is None else scale == 0.0),
        divisor=divisor,
        num_micro_batches=len(micro_batches),
        evidence=evidence,
        guard_scale=decision.scale,
        by_lag=lag_metrics_of(found),
        values=values,
    )


def _both_finite(optimizer: torch.optim.Optimizer, critic: Critic) -> bool:
    """Whether both gradients are finite: policy and critic change together or not at all."""
    return all(math.isfinite(float(gradient_norm(each))) for each in (optimizer, critic.optimizer))


def _critic_stepped(
    critic: Critic | None, found: Sequence[MicroBatchSums], *, max_grad_norm: float, scale: float
) -> ValueMetrics | None:
    if critic is None:
        return None
    update = apply_gradient(critic.optimizer, critic.schedule, max_grad_norm=max_grad_norm, scale=scale)
    return critic_metrics_of([each.value_loss for each in found if each.value_loss is not None], update)


def _announced(micro_batches: Sequence[Packed], model: PackedModel, critic: Critic | None) -> Iterator[Packed]:
    """Yield the micro-batches; tell the sharded models before each whether its backward pass is the last one."""
    for number, packed in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        expect_backward(model, last=last)
        if critic is not None and isinstance(critic.module, PackedModel):
            expect_backward(critic.module, last=last)
        yield packed


def _guard_decision(evidence: Evidence, *, objective: ObjectiveConfig, ranks: Ranks) -> GuardDecision:
    decision = decide(evidence, objective=objective)
    if decision.reason and ranks.rank == 0:
        log.warning("guard: learning rate of this step scaled by %.3g: %s", decision.scale, decision.reason)
    return decision


def _forward(
    model: PackedModel,
    packed: Packed,
    *,
    settings: StepSettings,
    proximal_logprobs: Tensor | None,
    reference: PackedModel | None,
    critic: Critic | None,
    value_weight: float,
) -> tuple[MicroBatchSums, list[Tensor]]:
    """The sums of this micro-batch, and what to minimise: losses with gradient, each for a backward pass of its own."""
    objective = settings.objective
    current = model(packed, entropy_gradient=objective.entropy_bonus > 0)
    tokens = LossTokens(
        current_logprobs=current.logprobs,
        behaviour_logprobs=packed.behaviour_logprobs[packed.loss_mask],
        proximal_logprobs=proximal_logprobs,
        reference_logprobs=None if reference is None else _frozen_logprobs(reference, packed),
        advantages=packed.advantages[packed.loss_mask],
        entropies=current.entropies,
        lags=packed.loss_lags,
        sequences=packed.loss_sequences,
    )
    loss = policy_loss(tokens, max_lag=settings.max_lag, objective=objective)
    loss_sums, value_loss = [loss.loss_sum], None
    if critic is not None:
        value_loss = critic_loss(critic, packed, current)
        # Always a mean over tokens, for any normalisation of the policy's loss.
        value_sum = value_loss.loss_sum * value_weight
        if critic.is_shared:  # one graph, one backward pass
            loss_sums = [loss.loss_sum + objective.value_coefficient * value_sum]
        else:
            loss_sums = [value_sum, loss.loss_sum]
    sums = MicroBatchSums(
        loss=_without_gradient(loss),
        trajectories=packed.trajectories,
        value_loss=None if value_loss is None else _without_gradient(value_loss),
        entropy_sum=current.entropies.detach().sum(),
    )
    return sums, loss_sums


def _lap(clock: Clock | None, name: str) -> None:
    if clock:
        clock.lap(name)


def _frozen_logprobs(reference: PackedModel, packed: Packed) -> Tensor:
    with torch.no_grad():
        logprobs: Tensor = reference(packed).logprobs
    return logprobs


L = TypeVar("L", PolicyLoss, ValueLoss)


def _without_gradient(loss: L) -> L:
    return dataclasses.replace(loss, loss_sum=loss.loss_sum.detach())
