"""What training changes, and what changes it: a warm start, and one optimizer step for one batch after another.

`learner.learn` brings it batches that actors make, `learner.rerun` those of an archive.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from common import archive
from common.config import Config
from common.run_dir import RunDir
from common.shutdown import Shutdown
from learner import checkpoint
from learner.checkpoint import Progress
from learner.checkpoint_writer import CheckpointWriter
from learner.clock import Clock
from learner.model.critic import Critic, begin_at, load_critic, policy_kind
from learner.model.export import save_adapters, save_hf
from learner.model.flops import Flops, flops_of
from learner.objective.kl import k1
from learner.measure import Measured, measure
from learner.model.packed_model import PackedModel, load_kind
from learner.model.optimizer import make_optimizer, make_schedule
from learner.pack import TokenSequence, count_loss_tokens, count_sequences, micro_batches, sequences_of
from learner.ranks import Ranks
from learner.reference import reference_at, reference_step
from learner.score import Judge, load_judge
from learner.step import train_step
from learner.step_metrics import StepMetrics, summed_over_ranks
from learner.supply import Batch
from learner.warm_start import WarmStartStep, imitate
from learner.token_advantages import weighed_sequences

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
    critic: Critic | None
    checkpoints: CheckpointWriter
    reference: PackedModel | None = None  # for objectives with a KL divergence; from the first step on
    judge: Judge | None = None  # for objectives with a reward model; from the first step on

    @property
    def flops(self) -> Flops:
        """What training this model costs."""
        return flops_of(
            self.model,
            peak_tflops=self.config.learner.peak_tflops,
            device=self.ranks.device,
            num_ranks=self.ranks.num_ranks,
        )


def load_learner(config: Config, run_dir: RunDir, ranks: Ranks) -> tuple[Learner, bool]:
    """The learner as the newest whole checkpoint left it, or as it begins; and which of the two."""
    torch.manual_seed(config.run.seed)
    model = load_kind(
        policy_kind(config),
        config.model.path or run_dir.model,
        ranks=ranks,
        dtype=config.model.dtype,
        activation_checkpointing=config.learner.activation_checkpointing,
        compile=config.learner.compile,
        cpu_offload=config.learner.cpu_offload,
        lora=config.model.lora,
    )
    optimizer = make_optimizer(model.causal_lm, config=config.optim)
    policy_steps = config.learner.steps - config.objective.critic_warmup_steps
    schedule = make_schedule(optimizer, config=config.optim, num_steps=policy_steps)
    critic = load_critic(config, model, ranks=ranks)
    progress = Progress(step=0, policy_version=0, highest_published=-1, next_group_id=0, tokens_trained=0)
    newest = checkpoint.latest_checkpoint(run_dir.checkpoints)
    if newest is not None:
        progress = checkpoint.load(newest, model=model, optimizer=optimizer, schedule=schedule, critic=critic)
        log.info("resumed from %s: version %d", newest.name, progress.policy_version)
    learner = Learner(
        config=config,
        run_dir=run_dir,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        progress=progress,
        critic=critic,
        checkpoints=CheckpointWriter(run_dir.checkpoints, ranks=ranks, keep=config.learner.keep_checkpoints),
    )
    return learner, newest is not None


def begin(learner: Learner) -> None:
    """What reinforcement learning begins with, or goes on with: a critic of the policy's weights, reference and judge.

    Before the first step the first two are the policy as it is then; later they come from the checkpoint and from the
    run's folder. Every rank calls it. Raises ConfigError for a run that began without a reference.
    """
    if learner.critic is not None and learner.progress.step == 0:
        begin_at(learner.critic, learner.model)
    _take_reference(learner)
    learner.judge = load_judge(learner.config, learner.model, ranks=learner.ranks)


def judged(learner: Learner, batch: Batch) -> Batch:
    """The batch with all that its episodes earned. Every rank calls it."""
    return learner.judge.scored(batch) if learner.judge else batch


def train_on(learner: Learner, batch: Batch, clock: Clock) -> StepMetrics:
    """Make one optimizer step on `batch`, and lap "measure", "pack" and the parts of `train_step`."""
    config, ranks, before, critic = learner.config, learner.ranks, learner.progress, learner.critic
    measured = _measure(learner, batch)
    clock.lap("measure")
    sequences = weighed_sequences(batch.groups, objective=config.objective, measured=measured)
    clock.lap("pack")
    packs = micro_batches(
        sequences, max_tokens=config.learner.micro_batch_tokens, num_ranks=ranks.num_ranks, rank=ranks.rank
    )
    metrics = train_step(
        learner.model,
        learner.optimizer,
        learner.schedule,
        packs,
        reference=learner.reference if config.objective.kl_place == "loss" else None,
        critic=critic,
        critic_only=before.step < config.objective.critic_warmup_steps,
        ranks=ranks,
        objective=config.objective,
        global_num_loss_tokens=count_loss_tokens(sequences),
        global_num_sequences=count_sequences(sequences),
        temperature=config.sampling.temperature,
        chunk_tokens=config.learner.logprob_chunk_tokens,
        max_grad_norm=config.optim.max_grad_norm,
        clock=clock,
    )
    if measured.reference_logprobs is not None:  # as the reward has it, where the loss has none
        divergence = k1(torch.from_numpy(measured.reference_logprobs), _behaviour_logprobs(sequences))
        metrics = dataclasses.replace(metrics, reference_kl=float(divergence.mean()))
    if critic is not None and config.objective.normalise_returns and not metrics.skipped:
        critic.scale = critic.scale.after(_returns(sequences))
    learner.progress = msgspec.structs.replace(
        before,
        step=before.step + 1,
        policy_version=before.policy_version + 1,
        next_group_id=batch.next_group_id,
        tokens_trained=before.tokens_trained + sum(sequence.num_tokens for sequence in sequences),
    )
    every = config.objective.reference_every
    if every and reference_step(before.step + 1, every=every) == before.step + 1:
        _take_reference(learner)
        clock.lap("reference")
    return metrics


def _take_reference(learner: Learner) -> None:
    learner.reference = None  # its memory is free before the next one is read
    learner.reference = reference_at(
        learner.model, learner.config, learner.run_dir, step=learner.progress.step, ranks=learner.ranks
    )


def _measure(learner: Learner, batch: Batch) -> Measured:
    """What the objective needs to know of the batch before it is weighed."""
    config = learner.config
    bare = [
        sequence
        for group in batch.groups
        for trajectory in group.trajectories
        for sequence in sequences_of(trajectory, advantage=0.0)
    ]
    return measure(
        bare,
        model=learner.model,
        critic=learner.critic,
        reference=learner.reference,
        ranks=learner.ranks,
        objective=config.objective,
        temperature=config.sampling.temperature,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        chunk_tokens=config.learner.logprob_chunk_tokens,
    )


def _behaviour_logprobs(sequences: Sequence[TokenSequence]) -> Float64[Tensor, " tokens"]:
    found = [sequence.behaviour_logprobs[sequence.loss_mask] for sequence in sequences]
    return torch.from_numpy(np.concatenate(found)).double()


def _returns(sequences: Sequence[TokenSequence]) -> npt.NDArray[np.float64]:
    """What the critic was trained towards, at every loss token of the batch."""
    found = [sequence.returns[sequence.loss_mask] for sequence in sequences if sequence.returns is not None]
    return np.concatenate(found).astype(np.float64)


def begin_checkpoint(learner: Learner, once_durable: Callable[[], None] = lambda: None) -> None:
    """Write down where the learner stands, while it goes on: see `CheckpointWriter.begin`. Every rank calls it."""
    learner.checkpoints.begin(
        learner.model,
        learner.optimizer,
        learner.schedule,
        learner.critic,
        progress=learner.progress,
        once_durable=once_durable,
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
