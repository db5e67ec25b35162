"""One optimizer step: forward and backward over the micro-batches, then one clipped update."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from common.objective_config import ObjectiveConfig
from learner.clock import Clock
from learner.model.critic import Critic, critic_loss
from learner.model.gradient import apply_gradient, backward, gradient_norm
from learner.objective.guard import Verdict, judge
from learner.loss import PolicyLoss, policy_loss
from learner.model.packed_model import PackedModel, expect_backward
from learner.objective.normalisation import loss_divisor
from learner.pack import Packed
from learner.ranks import Ranks
from learner.step_metrics import Part, StepMetrics, critic_metrics_of, measured_over_ranks, step_metrics_of
from learner.objective.value_loss import ValueLoss, ValueMetrics

log = logging.getLogger(__name__)


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
    one_pass = partial(
        _forward_and_backward, model, reference=reference, critic=critic, ranks=ranks, objective=objective,
        temperature=temperature, chunk_tokens=chunk_tokens, divisor=divisor, num_loss_tokens=global_num_loss_tokens,
        clock=clock,
    )  # fmt: skip
    found = [one_pass(packed.to(ranks.device)) for packed in _announced(micro_batches, model, critic)]
    measured = measured_over_ranks(found)
    verdict = _judged(measured, objective=objective, ranks=ranks)
    scale = verdict.scale if critic is None or _both_finite(optimizer, critic) else 0.0
    update = apply_gradient(optimizer, schedule, max_grad_norm=max_grad_norm, scale=0.0 if critic_only else scale)
    values = _critic_stepped(critic, found, max_grad_norm=max_grad_norm, scale=scale)
    _lap(clock, "optimizer")
    return step_metrics_of(
        measured,
        dataclasses.replace(update, skipped=update.skipped if critic is None else scale == 0.0),
        divisor=divisor,
        num_micro_batches=len(micro_batches),
        num_sequences=global_num_sequences,
        guard_scale=verdict.scale,
        values=values,
    )


def _both_finite(optimizer: torch.optim.Optimizer, critic: Critic) -> bool:
    """Whether policy and critic may move: neither does without the other. A policy alone is looked at as it moves."""
    return all(math.isfinite(float(gradient_norm(each))) for each in (optimizer, critic.optimizer))


def _critic_stepped(
    critic: Critic | None, found: Sequence[Part], *, max_grad_norm: float, scale: float
) -> ValueMetrics | None:
    if critic is None:
        return None
    update = apply_gradient(critic.optimizer, critic.schedule, max_grad_norm=max_grad_norm, scale=scale)
    return critic_metrics_of([part.value_loss for part in found if part.value_loss is not None], update)


def _announced(micro_batches: Sequence[Packed], model: PackedModel, critic: Critic | None) -> Iterator[Packed]:
    """One after the other; the sharded models are told before each whether its backward pass is the last."""
    for number, packed in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        expect_backward(model, last=last)
        if critic is not None and isinstance(critic.module, PackedModel):
            expect_backward(critic.module, last=last)
        yield packed


def _judged(measured: dict[str, float], *, objective: ObjectiveConfig, ranks: Ranks) -> Verdict:
    ratio_sum, num_loss_tokens = measured["ratio_sum"], measured["num_loss_tokens"]
    verdict = judge(
        effective_sample_size=ratio_sum**2 / measured["ratio_square_sum"] / num_loss_tokens,
        ratio_mean=ratio_sum / num_loss_tokens,
        objective=objective,
    )
    if verdict.reason and ranks.rank == 0:
        log.warning("guard: step scaled by %.3g: %s", verdict.scale, verdict.reason)
    return verdict


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
) -> Part:
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
    return Part(
        loss=_without_gradient(loss),
        value_loss=None if value_loss is None else _without_gradient(value_loss),
        entropy_sum=current.entropies.detach().sum(),
    )


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
