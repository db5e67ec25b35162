"""The learner's state, and the operations on it: load, warm start, train on a batch, checkpoint, export.

`slipstream.learner.learn` trains it on batches of actors, `slipstream.learner.rerun` on those of an archive.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.process.wire import WireError
from slipstream.common.records import frame_file
from slipstream.common.records.trajectory import InvalidTrajectory
from slipstream.common.text.codec import encoder
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.learner.batch.batch import Batch
from slipstream.learner.batch.pack import TokenSequence, bins_of_rank, returns_of, sequences_of, with_lags
from slipstream.learner.checkpoint import checkpoint
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.checkpoint.checkpoint_writer import CheckpointWriter
from slipstream.learner.credit.measure import Measured, measure
from slipstream.learner.credit.reference import reference_at
from slipstream.learner.credit.score import RewardScorer, load_reward_scorer
from slipstream.learner.credit.teacher import PROBE, Teacher, find_teacher
from slipstream.learner.credit.token_advantages import sequences_with_advantages
from slipstream.learner.model.critic import begin_at, load_critic, policy_kind
from slipstream.learner.model.export import save_adapters, save_hf, write_sampling
from slipstream.learner.model.flops import Flops, flops_of
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import ModelSettings, PackedModel, load_kind
from slipstream.learner.model.probe_score import check_export
from slipstream.learner.ranks.ranks import Ranks, resolve_dtype, share
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.step import StepBatch, StepModels, StepSettings, train_step
from slipstream.learner.step.step_metrics import StepMetrics
from slipstream.learner.step.token_recorder import record_tokens
from slipstream.learner.warm_start import imitate

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Learner:
    """The state of training."""

    config: Config
    run_dir: RunDir
    ranks: Ranks
    models: StepModels  # what a step changes and a checkpoint contains; `begin` adds the reference
    progress: Progress
    checkpoints: CheckpointWriter
    checkpoint_step: int = -1  # of the newest checkpoint, which may still be under way; -1: there is none
    teacher: Teacher | None = None  # a reference behind a URL; set by `begin`
    scorer: RewardScorer | None = None  # for objectives with a reward model; set by `begin`

    @property
    def has_checkpoint(self) -> bool:
        return self.checkpoint_step >= 0

    @property
    def model(self) -> PackedModel:
        """The policy."""
        return self.models.policy

    @property
    def flops(self) -> Flops:
        """The cost of training this model, in floating-point operations."""
        return flops_of(self.model, device=self.ranks.device, num_ranks=self.ranks.num_ranks)


def load_learner(config: Config, run_dir: RunDir, ranks: Ranks, *, check: Callable[[], None] = lambda: None) -> Learner:
    """The learner from its newest intact checkpoint, or a new one.

    On rank 0, `check` raises FencedOut if another learner has taken over. Raises ConfigError, FencedOut.
    """
    resolve_dtype(config.model, ranks.device)
    torch.manual_seed(config.run.seed)
    folder, began_at = Path(config.model.path or run_dir.model), time.monotonic()
    log.info("loading the model in %s", folder)
    model = load_kind(policy_kind(config.objective), folder, ranks=ranks, settings=ModelSettings.of(config))
    log.info("the model is loaded after %.1f s", time.monotonic() - began_at)
    optimizer = make_optimizer(model.causal_lm, config=config.optim)
    policy_steps = config.learner.steps - config.objective.critic_warmup_steps
    if config.optim.warmup_steps >= policy_steps:
        log.warning(
            "`optim.warmup_steps` is %d, but the policy learns in %d steps: its learning rate never reaches "
            "`optim.lr`; take fewer warm-up steps, or raise `learner.steps`",
            config.optim.warmup_steps,
            policy_steps,
        )
    models = StepModels(
        policy=model,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config=config.optim, num_steps=policy_steps),
        critic=load_critic(config.objective, model, optim=config.optim, num_steps=config.learner.steps, ranks=ranks),
    )
    # Before the newest checkpoint is looked for: an earlier learner must not finish another one meanwhile.
    checkpoints = CheckpointWriter(run_dir.checkpoints, ranks=ranks, keep=config.learner.keep_checkpoints, check=check)
    learner = Learner(
        config=config,
        run_dir=run_dir,
        ranks=ranks,
        models=models,
        progress=Progress(step=0, policy_version=0, highest_published=-1, next_group_id=0, tokens_trained=0),
        checkpoints=checkpoints,
    )
    if (newest := checkpoints.newest(ranks=ranks)) is not None:
        learner.progress = checkpoint.load(newest, models)
        learner.checkpoint_step = learner.progress.step
        log.info("resumed from %s: version %d", newest.name, learner.progress.policy_version)
    return learner


def begin(learner: Learner) -> None:
    """Prepare critic, reference and reward scorer for reinforcement learning.

    Before the first step the first two are copies of the policy; later they come from the checkpoint and the run's
    folder. Every rank calls it. Raises ConfigError if the run needs a reference that it never wrote.
    """
    if learner.progress.step == 0 and learner.models.critic is not None:
        begin_at(learner.models.critic, learner.model)
    reference = reference_at(
        learner.model, learner.config.objective, learner.run_dir, step=learner.progress.step, ranks=learner.ranks
    )
    learner.models = dataclasses.replace(learner.models, reference=reference)
    if url := learner.config.objective.teacher_url:
        probe = encoder(load_tokenizer(learner.model.folder))(PROBE)
        learner.teacher = find_teacher(url, probe=probe, max_tokens=learner.config.model.max_tokens)
    learner.scorer = load_reward_scorer(
        learner.config.objective,
        learner.model,
        micro_batch_tokens=learner.config.learner.micro_batch_tokens,
        ranks=learner.ranks,
    )


def scored(learner: Learner, batch: Batch) -> Batch:
    """The batch with the reward model's scores, if the objective has one. Every rank calls it."""
    return learner.scorer.scored(batch) if learner.scorer else batch


def train_on(learner: Learner, batch: Batch, clock: Clock) -> StepMetrics:
    """Make one optimizer step on `batch`; time "measure", "pack" and the parts of `train_step`."""
    config, ranks, before, critic = learner.config, learner.ranks, learner.progress, learner.models.critic
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    bare = [sequence for trajectory in trajectories for sequence in sequences_of(trajectory, advantage=0.0)]
    measured = _measure(learner, bare)
    clock.lap("measure")
    sequences = sequences_with_advantages(batch.groups, objective=config.objective, measured=measured)
    sequences = with_lags(sequences, before.lags)
    bins = bins_of_rank(
        sequences,
        max_tokens=config.learner.micro_batch_tokens,
        num_ranks=ranks.num_packing,
        rank=ranks.packing_rank,
        share_prefixes=learner.models.share_prefixes,
    )
    packs = [each.pack(sequences, context=ranks.context) for each in bins]
    clock.lap("pack")
    part = StepBatch.of(sequences, packs)
    settings = StepSettings(
        objective=config.objective,
        max_lag=config.replay.max_lag,
        max_grad_norm=config.optim.max_grad_norm,
        critic_only=before.step < config.objective.critic_warmup_steps,
    )
    metrics = train_step(learner.models, part, settings=settings, ranks=ranks, clock=clock)
    if config.replay.archive and ranks.counts:
        record_tokens(
            learner.run_dir, batch, sequences, bins=bins, losses=metrics.losses, before=before, rank=ranks.rank
        )
        clock.lap("archive")
    if measured.reference_logprobs is not None:  # the divergence is in the reward, not in the loss
        sampled = np.concatenate([sequence.behaviour_logprobs[sequence.loss_mask] for sequence in bare])
        metrics = dataclasses.replace(metrics, reference_kl=float((sampled - measured.reference_logprobs).mean()))
    if critic is not None and not metrics.skipped:
        critic.scale = critic.scale.after(returns_of(sequences))
    learner.progress = msgspec.structs.replace(
        before,
        step=before.step + 1,
        policy_version=before.policy_version + 1,
        next_group_id=batch.next_group_id,
        tokens_trained=before.tokens_trained + sum(trajectory.num_own_tokens for trajectory in trajectories),
    )
    return metrics


def _measure(learner: Learner, sequences: Sequence[TokenSequence]) -> Measured:
    """Measure what the objective needs to compute the advantages of a batch."""
    measured = measure(
        sequences,
        models=learner.models,
        ranks=learner.ranks,
        objective=learner.config.objective,
        micro_batch_tokens=learner.config.learner.micro_batch_tokens,
    )
    if learner.teacher is None:
        return measured
    return dataclasses.replace(measured, reference_logprobs=_asked_of(learner.teacher, sequences, learner.ranks))


def _asked_of(teacher: Teacher, sequences: Sequence[TokenSequence], ranks: Ranks) -> npt.NDArray[np.float64]:
    """The teacher's log-probability of each loss token, the same on every rank: rank 0 asks."""
    found = teacher.logprobs(sequences).tobytes() if ranks.rank == 0 else None
    return np.frombuffer(share(found, bytes, ranks=ranks), dtype=np.float64)


def begin_checkpoint(learner: Learner, once_durable: Callable[[], None] = lambda: None) -> None:
    """Begin to write a checkpoint in the background: see `CheckpointWriter.begin`. Every rank calls it."""
    learner.checkpoints.begin(learner.models, progress=learner.progress, once_durable=once_durable)
    learner.checkpoint_step = learner.progress.step


def export(learner: Learner) -> None:
    """Export the trained model as a Hugging Face folder, and its adapters separately. Every rank calls it."""
    save_hf(learner.model, learner.run_dir.trained_model, ranks=learner.ranks)
    if learner.ranks.rank == 0:
        write_sampling(learner.model, learner.run_dir.trained_model, learner.config.sampling)
    if learner.config.model.lora.rank:
        save_adapters(learner.model, learner.run_dir.trained_adapters, ranks=learner.ranks)
    check_export(learner.model, learner.run_dir.trained_model, ranks=learner.ranks)


def imitate_expert(learner: Learner, demonstrations: Path, shutdown: Shutdown) -> int | None:
    """Imitate the expert; return the number of optimizer steps, or None if a stop was requested before the last."""
    config = learner.config
    try:
        episodes = list(frame_file.read(demonstrations, vocab_size=learner.model.vocab_size))
    except (OSError, WireError, InvalidTrajectory) as error:
        raise ConfigError(
            f"{demonstrations} is damaged: {error}; remove it, and the next start generates it again"
        ) from error
    num_steps = 0
    for _ in imitate(
        learner.model,
        episodes,
        config=config.warm_start,
        ranks=learner.ranks,
        seed=config.run.seed,
        micro_batch_tokens=config.learner.micro_batch_tokens,
    ):
        num_steps += 1
        if stop_requested(shutdown, learner.ranks):
            log.info("stopping during imitation, as requested")
            return None
    return num_steps


def stop_requested(shutdown: Shutdown, ranks: Ranks) -> bool:
    """Whether any rank was asked to stop: signals reach ranks at different times, but all must stop after one step."""
    return ranks.any(shutdown.requested.is_set())
