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

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.batch.pack import Packed, TokenSequence, count_loss_tokens, count_trajectories
from slipstream.learner.model.critic import Critic, critic_loss
from slipstream.learner.model.gradient import Update, apply_gradient, backward, gradient_norm
from slipstream.learner.model.packed_model import PackedModel, expect_backward
from slipstream.learner.objective.guard import decide
from slipstream.learner.objective.loss_tokens import LossTokens
from slipstream.learner.objective.normalisation import loss_divisor
from slipstream.learner.objective.value_loss import ValueLoss, ValueMetrics
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.loss import PolicyLoss, policy_loss
from slipstream.learner.step.step_metrics import (
    MicroBatchSums,
    StepMetrics,
    critic_metrics_of,
    evidence_from,
    lag_metrics_of,
    measured_over_ranks,
    ratios_of,
    token_metrics,
    trajectory_sums_over_ranks,
)

VALUE_COEFFICIENT = 0.5  # weight of a shared critic's loss beside the policy's, as in A3C and PPO

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """The settings of one optimizer step."""

    objective: ObjectiveConfig
    max_lag: int = 0  # optimizer steps; tokens that lag by more are masked
    max_grad_norm: float
    critic_only: bool = False  # the policy, its optimizer and its schedule do not change


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModels:
    """The models of a step, with the policy's optimizer; the step changes all of them but the reference."""

    policy: PackedModel
    optimizer: torch.optim.AdamW
    schedule: LambdaLR
    critic: Critic | None = None
    reference: PackedModel | None = None  # frozen, of the KL divergence; None if the objective has none

    @property
    def share_prefixes(self) -> bool:
        """Whether each computes a shared prefix once: a teacher may be of another family than the policy."""
        modules = (self.policy, self.reference, self.critic.module if self.critic else None)
        return all(module.shares_prefixes for module in modules if isinstance(module, PackedModel))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """This rank's part of a batch, and the counts of the whole batch over all ranks."""

    micro_batches: Sequence[Packed]
    num_loss_tokens: int
    num_trajectories: int

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], micro_batches: Sequence[Packed]) -> "StepBatch":
        """This rank's `micro_batches` of a whole batch of `sequences`."""
        return cls(
            micro_batches=micro_batches,
            num_loss_tokens=count_loss_tokens(sequences),
            num_trajectories=count_trajectories(sequences),
        )

    def __post_init__(self) -> None:
        if self.num_loss_tokens < 1:
            raise ValueError(
                f"a step needs at least 1 loss token, got {self.num_loss_tokens}; were all groups dropped?"
            )


def train_step(
    models: StepModels, batch: StepBatch, *, settings: StepSettings, ranks: Ranks, clock: Clock | None = None
) -> StepMetrics:
    """Make one optimizer step; every rank calls it with the same number of micro-batches.

        loss = sum over all loss tokens of all ranks / divisor
        critic's loss = sum over all loss tokens of all ranks / their number

    See `slipstream.learner.objective.normalisation` and `slipstream.learner.objective.value_loss`. If a gradient is not
    finite, or the guard skips the batch (see `slipstream.learner.objective.guard`), neither policy nor critic changes,
    nor do their optimizers and schedules; the metrics have `skipped`. `clock` times "forward", "backward" and
    "optimizer".
    """
    clock = clock or Clock(ranks.device)
    divisor = loss_divisor(
        num_loss_tokens=batch.num_loss_tokens, num_trajectories=batch.num_trajectories, objective=settings.objective
    )
    found = _gradients(models, batch, divisor=divisor, settings=settings, ranks=ranks, clock=clock)
    measured = measured_over_ranks(found, ranks=ranks)
    sums = trajectory_sums_over_ranks(found, num_trajectories=batch.num_trajectories, ranks=ranks)
    evidence = evidence_from(sums, measured)
    decision = decide(evidence, objective=settings.objective)
    if decision.reason and ranks.rank == 0:
        log.warning("guard: learning rate of this step scaled by %.3g: %s", decision.scale, decision.reason)
    update, values = _updated(models, found, settings=settings, scale=decision.scale, ranks=ranks)
    clock.lap("optimizer")
    return StepMetrics(
        **token_metrics(measured, divisor=divisor),
        **dataclasses.asdict(update),
        num_micro_batches=len(batch.micro_batches),
        evidence=evidence,
        trajectory_ratios=ratios_of(sums),
        guard_scale=decision.scale,
        by_lag=lag_metrics_of(found, ranks=ranks),
        values=values,
        losses=[each.loss for each in found],
    )


def _gradients(
    models: StepModels, batch: StepBatch, *, divisor: int, settings: StepSettings, ranks: Ranks, clock: Clock
) -> list[MicroBatchSums]:
    """Accumulate the gradients of the micro-batches, and return the sums of each."""
    found = []
    for packed in _announced(batch.micro_batches, models):
        sums, loss_sums = _forward(
            models, packed.to(ranks.device), settings=settings, value_weight=divisor / batch.num_loss_tokens
        )
        clock.mark("forward")
        for loss_sum in loss_sums:
            backward(loss_sum, ranks=ranks, divisor=divisor)
        clock.mark("backward")
        found.append(sums)
    return found


def _updated(
    models: StepModels, found: Sequence[MicroBatchSums], *, settings: StepSettings, scale: float, ranks: Ranks
) -> tuple[Update, ValueMetrics | None]:
    """Apply the gradients to policy and critic, or to neither if one is not finite."""
    if models.critic is not None and not _both_finite(models.optimizer, models.critic):
        scale = 0.0
    update = apply_gradient(
        models.optimizer,
        models.schedule,
        max_grad_norm=settings.max_grad_norm,
        scale=0.0 if settings.critic_only else scale,
    )
    if models.critic is None:
        return update, None
    of_critic = apply_gradient(
        models.critic.optimizer, models.critic.schedule, max_grad_norm=settings.max_grad_norm, scale=scale
    )
    value_losses = [each.value_loss for each in found if each.value_loss is not None]
    values = critic_metrics_of(value_losses, of_critic, ranks=ranks)
    return dataclasses.replace(update, skipped=scale == 0.0), values


def _both_finite(optimizer: torch.optim.Optimizer, critic: Critic) -> bool:
    """Whether both gradients are finite: policy and critic change together or not at all."""
    return all(math.isfinite(float(gradient_norm(each))) for each in (optimizer, critic.optimizer))


def _announced(micro_batches: Sequence[Packed], models: StepModels) -> Iterator[Packed]:
    """Yield the micro-batches; tell the sharded models before each whether its backward pass is the last one."""
    for number, packed in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        expect_backward(models.policy, last=last)
        if models.critic is not None and isinstance(models.critic.module, PackedModel):
            expect_backward(models.critic.module, last=last)
        yield packed


def _forward(
    models: StepModels, packed: Packed, *, settings: StepSettings, value_weight: float
) -> tuple[MicroBatchSums, list[Tensor]]:
    """The sums of this micro-batch, and what to minimise: losses with gradient, each for a backward pass of its own."""
    objective, critic, reference = settings.objective, models.critic, models.reference
    current = models.policy(packed, entropy_gradient=objective.entropy_bonus > 0)
    reference_logprobs = None
    if reference is not None and objective.kl_place == "loss":
        with torch.no_grad():
            reference_logprobs = reference(packed).logprobs
    tokens = LossTokens(
        current_logprobs=current.logprobs,
        behaviour_logprobs=packed.behaviour_logprobs[packed.loss_positions],
        reference_logprobs=reference_logprobs,
        advantages=packed.advantages[packed.loss_positions],
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
        shared = [loss.loss_sum + VALUE_COEFFICIENT * value_sum]  # one graph, one backward pass
        loss_sums = shared if critic.is_shared else [value_sum, loss.loss_sum]
    sums = MicroBatchSums(
        loss=_without_gradient(loss),
        trajectories=packed.trajectories,
        value_loss=None if value_loss is None else _without_gradient(value_loss),
        entropy_sum=current.entropies.detach().sum(),
        num_computed_tokens=sum(packed.computed_lengths),
        num_pairs=packed.num_pairs,
    )
    return sums, loss_sums


L = TypeVar("L", PolicyLoss, ValueLoss)


def _without_gradient(loss: L) -> L:
    return dataclasses.replace(loss, loss_sum=loss.loss_sum.detach())
