"""The warm start: imitates expert episodes, so that some attempts succeed when reinforcement learning begins."""

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from slipstream.common.config.learner_config import OptimConfig, WarmStartConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.long_work import LongWork
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.batch.pack import TokenSequence, count_loss_tokens, sequences_of
from slipstream.learner.model.gradient import apply_gradient, backward_over
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import PackedModel
from slipstream.learner.ranks.ranks import Ranks

log = logging.getLogger(__name__)


def imitate(
    model: PackedModel,
    trajectories: Sequence[Trajectory],
    *,
    config: WarmStartConfig,
    ranks: Ranks,
    seed: int,
    micro_batch_tokens: int,
) -> Iterator[float]:
    """Train the policy to imitate the expert; yield the loss of each optimizer step, in nats a token, once it is made.

        loss = -sum(logprob of each loss token at temperature 1) / number of loss tokens in the step, over all ranks

    Every rank passes all of the trajectories. They are visited once, in a seeded order, in steps of at most
    `config.batch_tokens` tokens. The optimizer is used only here: reinforcement learning begins with a new one. Raises
    ConfigError if there are no trajectories.
    """
    sequences = [part for trajectory in trajectories for part in sequences_of(trajectory, advantage=0.0)]
    batches = _batches(sequences, batch_tokens=config.batch_tokens, seed=seed)
    if not batches:
        raise ConfigError(
            f"`warm_start.episodes` is {config.episodes}, but the run's demonstrations have no episode; remove their "
            "file, and the next start generates it again, or set it to 0 to skip the warm start"
        )
    optim = OptimConfig(lr=config.lr, schedule="linear")
    optimizer = make_optimizer(model, config=optim)
    schedule = make_schedule(optimizer, config=optim, num_steps=len(batches))
    work = LongWork("warm start, steps", len(batches))
    for step, batch in enumerate(batches, start=1):
        num_loss_tokens = count_loss_tokens(batch)
        with model.at_temperature(1.0):
            loss_sum = backward_over(
                model,
                batch,
                lambda packed: -model(packed).logprobs.sum(),
                max_tokens=micro_batch_tokens,
                ranks=ranks,
                divisor=num_loss_tokens,
            )
        apply_gradient(optimizer, schedule, max_grad_norm=optim.max_grad_norm)
        loss = loss_sum / num_loss_tokens
        work.at(step, more=f"{loss:.3f} nats per token")
        if step in (1, len(batches)):
            log.info("warm start step %d of %d: %.3f nats per token", step, len(batches), loss)
        yield loss


def _batches(sequences: Sequence[TokenSequence], *, batch_tokens: int, seed: int) -> list[list[TokenSequence]]:
    """The batch of each step: as many whole sequences as fit into `batch_tokens`, and at least one."""
    batches: list[list[TokenSequence]] = []
    batch: list[TokenSequence] = []
    for index in np.random.default_rng(seed).permutation(len(sequences)):
        sequence = sequences[index]
        if batch and sum(member.num_tokens for member in batch) + sequence.num_tokens > batch_tokens:
            batches.append(batch)
            batch = []
        batch.append(sequence)
    return [*batches, batch] if batch else batches
