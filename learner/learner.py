"""What training changes, and what changes it: a warm start, and one optimizer step for one batch after another.

`learner.learn` brings it batches that actors make, `learner.rerun` those of an archive.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch.optim.lr_scheduler import LambdaLR

from common import archive
from common.config import Config
from common.run_dir import RunDir
from common.shutdown import Shutdown
from learner import checkpoint
from learner.checkpoint import Progress
from learner.export import save_adapters, save_hf
from learner.model import PackedModel, load_model
from learner.optimizer import make_optimizer, make_schedule
from learner.pack import count_loss_tokens, count_sequences, micro_batches
from learner.ranks import Ranks
from learner.step import StepMetrics, summed_over_ranks, train_step
from learner.supply import Batch
from learner.warm_start import WarmStartStep, imitate
from learner.weigh import weighed_sequences

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Learner:
    """What training changes, and where it happens."""

    config: Config
    run_dir: RunDir
    ranks: Ranks
    model: PackedModel
    optimizer: torch.optim.AdamW
    schedule: LambdaLR
    progress: Progress
    reference: PackedModel | None = None  # frozen, for objectives with a KL divergence; from the first step on


class Clock:
    """Splits a step's wall clock into named parts that add up to it."""

    def __init__(self) -> None:
        self.times_s: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`."""
        now = time.perf_counter()
        self.times_s[name] = now - self._last
        self._last = now


def load_learner(config: Config, run_dir: RunDir, ranks: Ranks) -> tuple[Learner, bool]:
    """The learner as the newest whole checkpoint left it, or as it begins; and which of the two."""
    torch.manual_seed(config.run.seed)
    model = load_model(
        config.model.path or run_dir.model,
        ranks=ranks,
        dtype=config.model.dtype,
        activation_checkpointing=config.learner.activation_checkpointing,
        lora=config.model.lora,
    )
    optimizer = make_optimizer(model, config=config.optim)
    schedule = make_schedule(optimizer, config=config.optim, num_steps=config.learner.steps)
    progress = Progress(step=0, policy_version=0, highest_published=-1, next_group_id=0, tokens_trained=0)
    newest = checkpoint.latest_checkpoint(run_dir.checkpoints)
    if newest is not None:
        progress = checkpoint.load(newest, model=model, optimizer=optimizer, schedule=schedule)
        log.info("resumed from %s: version %d", newest.name, progress.policy_version)
    learner = Learner(
        config=config,
        run_dir=run_dir,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        progress=progress,
    )
    return learner, newest is not None


def train_on(learner: Learner, batch: Batch, clock: Clock) -> StepMetrics:
    """Make one optimizer step on `batch`, and lap "pack" and "train"."""
    config, ranks, before = learner.config, learner.ranks, learner.progress
    sequences = weighed_sequences(batch.groups, objective=config.objective)
    clock.lap("pack")
    packs = micro_batches(
        sequences, max_tokens=config.learner.micro_batch_tokens, num_ranks=ranks.num_ranks, rank=ranks.rank
    )
    metrics = train_step(
        learner.model,
        learner.optimizer,
        learner.schedule,
        packs,
        reference=learner.reference,
        ranks=ranks,
        objective=config.objective,
        global_num_loss_tokens=count_loss_tokens(sequences),
        global_num_sequences=count_sequences(sequences),
        temperature=config.sampling.temperature,
        chunk_tokens=config.learner.logprob_chunk_tokens,
        max_grad_norm=config.optim.max_grad_norm,
    )
    clock.lap("train")
    learner.progress = msgspec.structs.replace(
        before,
        step=before.step + 1,
        policy_version=before.policy_version + 1,
        next_group_id=batch.next_group_id,
        tokens_trained=before.tokens_trained + sum(sequence.num_tokens for sequence in sequences),
    )
    return metrics


def save_checkpoint(learner: Learner) -> None:
    """Write down where the learner stands, so that it can go on from there. Every rank calls it."""
    checkpoint.save(
        learner.run_dir.checkpoints,
        model=learner.model,
        optimizer=learner.optimizer,
        schedule=learner.schedule,
        progress=learner.progress,
        ranks=learner.ranks,
        keep=learner.config.learner.keep_checkpoints,
    )


def export(learner: Learner) -> None:
    """Write the trained model for others: a Hugging Face folder, and its adapters alone. Every rank calls it."""
    save_hf(learner.model, learner.run_dir.trained_model, ranks=learner.ranks)
    if learner.config.model.lora.rank:
        save_adapters(learner.model, learner.run_dir.trained_adapters, ranks=learner.ranks)


class _Stopped(Exception):
    """Told to stop in mid-imitation."""


def imitate_expert(learner: Learner, demonstrations: Path, shutdown: Shutdown) -> int | None:
    """The number of optimizer steps made; None when told to stop before the last."""
    config = learner.config
    episodes = list(archive.read(demonstrations, vocab_size=learner.model.vocab_size))

    def say(step: WarmStartStep) -> None:
        if step.step % max(1, step.num_steps // 5) == 0:
            log.info("warm start %d of %d: %.3f nats a token", step.step, step.num_steps, step.loss)
        if any_rank_is_told(shutdown, learner.ranks):
            raise _Stopped

    try:
        return imitate(
            learner.model,
            episodes,
            config=config.warm_start,
            ranks=learner.ranks,
            seed=config.run.seed,
            micro_batch_tokens=config.learner.micro_batch_tokens,
            chunk_tokens=config.learner.logprob_chunk_tokens,
            on_step=say,
        )
    except _Stopped:
        log.info("told to stop in mid-imitation")
        return None


def any_rank_is_told(shutdown: Shutdown, ranks: Ranks) -> bool:
    """Whether to stop: a signal reaches the ranks at different times, and they must stop after the same step."""
    told = torch.tensor(float(shutdown.requested.is_set()), device=ranks.device)
    return bool(summed_over_ranks({"told": told})["told"])
