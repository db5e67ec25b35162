"""The learner: groups in, policy versions out.

    claim(step) -> advantages -> packs -> one optimizer step -> publish -> checkpoint, settle

It waits for actors only where it has no batch, and what it consumed counts as trained only when a checkpoint that
covers the step is durable. Rank 0 alone talks to Redis; the other ranks hear from it.
"""

import logging
import time
from dataclasses import dataclass

import msgspec
import torch
from torch.optim.lr_scheduler import LambdaLR

from common import archive
from common.config import Config
from common.connection import connect_or_explain
from common.run_dir import RunDir
from common.shutdown import Shutdown
from learner import checkpoint
from learner.checkpoint import Progress
from learner.lead import Lead, join_run
from learner.model import PackedModel, full_tensors, load_model, save_hf
from learner.optimizer import make_optimizer, make_schedule
from learner.pack import TokenSequence, count_loss_tokens, count_sequences, micro_batches
from learner.ranks import Ranks
from learner.reference import frozen_reference
from learner.share import share
from learner.step import StepMetrics, summed_over_ranks, train_step
from learner.supply import Batch
from learner.warm_start import WarmStartStep, imitate
from learner.weigh import weighed_sequences
from replay.keys import FencedOut

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


def learn(config: Config, run_dir: RunDir, *, ranks: Ranks, shutdown: Shutdown) -> bool:
    """Train until `learner.steps`, or until told to stop; return whether the run is finished.

    Every rank calls it. Raises ConfigError, RedisUnreachable, SupplyDried, FencedOut.
    """
    torch.manual_seed(config.run.seed)
    learner, resumed = _load(config, run_dir, ranks)
    lead = _take_the_lead(learner) if ranks.rank == 0 else None
    fresh = share(lead.with_fresh_version(learner.progress) if lead else None, Progress, ranks=ranks)
    assert fresh is not None
    learner.progress = fresh
    try:
        _publish(learner, lead)
        if not resumed and not _warm_up(learner, lead, shutdown):
            return False
        learner.reference = frozen_reference(
            learner.model, config, run_dir, step=learner.progress.step, ranks=ranks
        )  # fmt: skip
        if learner.progress.step == 0:
            _evaluate_start(learner, lead, shutdown)
            _checkpoint(learner, lead)
        if lead:
            lead.train_from_here()
        while learner.progress.step < config.learner.steps and _step(learner, lead, shutdown):
            pass
        finished = learner.progress.step >= config.learner.steps
        if finished:
            finished = _finish(learner, lead, shutdown)
        elif learner.progress.step % config.learner.checkpoint_every:
            _checkpoint(learner, lead)
    except FencedOut:
        raise  # the run is another learner's now, and its state is not ours to set
    except BaseException:
        if lead:
            lead.fail()
        raise
    finally:
        if lead:
            lead.close()
    return finished


def _step(learner: Learner, lead: Lead | None, shutdown: Shutdown) -> bool:
    """One optimizer step, from the claim to the settled checkpoint; False when told to stop before its batch came."""
    clock, before, config = Clock(), learner.progress, learner.config
    batch = share(lead.next_batch(before, shutdown) if lead else None, Batch, ranks=learner.ranks)
    clock.lap("wait")
    if batch is None:
        return False
    sequences = weighed_sequences(batch.groups, objective=config.objective)
    clock.lap("pack")
    metrics = _train(learner, sequences)
    clock.lap("train")
    learner.progress = msgspec.structs.replace(
        before,
        step=before.step + 1,
        policy_version=before.policy_version + 1,
        next_group_id=batch.next_group_id,
        tokens_trained=before.tokens_trained + sum(sequence.num_tokens for sequence in sequences),
    )
    step, last = learner.progress.step, config.learner.steps
    if step % config.learner.publish_every == 0 or step == last:
        _publish(learner, lead)
    clock.lap("publish")
    if lead:
        lead.record_step(batch, metrics, before, clock.times_s)
    if step % config.learner.checkpoint_every == 0 or step == last:
        _checkpoint(learner, lead)
    return True


def _train(learner: Learner, sequences: list[TokenSequence]) -> StepMetrics:
    config, ranks = learner.config, learner.ranks
    packs = micro_batches(
        sequences, max_tokens=config.learner.micro_batch_tokens, num_ranks=ranks.num_ranks, rank=ranks.rank
    )
    return train_step(
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


def _load(config: Config, run_dir: RunDir, ranks: Ranks) -> tuple[Learner, bool]:
    """The learner as the newest whole checkpoint left it, or as it begins; and which of the two."""
    model = load_model(
        config.model.path or run_dir.model,
        ranks=ranks,
        dtype=config.model.dtype,
        activation_checkpointing=config.learner.activation_checkpointing,
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


def _take_the_lead(learner: Learner) -> Lead:
    config = learner.config
    links = join_run(
        connect_or_explain(config.redis.url),
        config,
        model_folder=learner.model.folder,
        vocab_size=learner.model.vocab_size,
    )
    return Lead(
        links,
        config,
        learner.run_dir,
        progress=learner.progress,
        redis_url=config.redis.url,
        device=learner.ranks.device.type,
    )


def _warm_up(learner: Learner, lead: Lead | None, shutdown: Shutdown) -> bool:
    """Evaluate what there is, and imitate the expert while the actors play that.

    False when told to stop in mid-imitation: then nothing of it is kept, and a resumed learner begins anew.
    """
    config = learner.config
    if config.warm_start.episodes:
        initial = lead.open_evaluation(learner.progress.policy_version) if lead and config.eval.num_tasks else None
        num_steps = _imitate(learner, shutdown)
        if num_steps is None:
            return False
        if lead and initial:
            lead.close_evaluation(initial, "initial", step=0, shutdown=shutdown)
        learner.progress = msgspec.structs.replace(
            learner.progress, policy_version=learner.progress.policy_version + num_steps
        )
        _publish(learner, lead)
    return True


def _evaluate_start(learner: Learner, lead: Lead | None, shutdown: Shutdown) -> None:
    """Evaluate what reinforcement learning begins with, unless that was done before this learner was resumed."""
    name = "warm_start" if learner.config.warm_start.episodes else "initial"
    if lead and learner.config.eval.num_tasks and not lead.has_evaluated(name):
        evaluation = lead.open_evaluation(learner.progress.policy_version)
        lead.close_evaluation(evaluation, name, step=0, shutdown=shutdown)


class _Stopped(Exception):
    """Told to stop in mid-imitation."""


def _imitate(learner: Learner, shutdown: Shutdown) -> int | None:
    """The number of optimizer steps made; None when told to stop before the last."""
    config = learner.config
    episodes = list(archive.read(learner.run_dir.demonstrations, vocab_size=learner.model.vocab_size))

    def say(step: WarmStartStep) -> None:
        if step.step % max(1, step.num_steps // 5) == 0:
            log.info("warm start %d of %d: %.3f nats a token", step.step, step.num_steps, step.loss)
        # Summed, as a signal reaches the ranks in different steps, and they must stop after the same one.
        told = torch.tensor(float(shutdown.requested.is_set()), device=learner.ranks.device)
        if summed_over_ranks({"told": told})["told"]:
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


def _publish(learner: Learner, lead: Lead | None) -> None:
    """Offer the weights as they are. Gathering is collective; only rank 0 copies them out."""
    version = learner.progress.policy_version
    tensors = full_tensors(learner.model)
    if lead:
        lead.publish(tensors, version)
    else:
        for _ in tensors:
            pass
    learner.progress = msgspec.structs.replace(learner.progress, highest_published=version)


def _checkpoint(learner: Learner, lead: Lead | None) -> None:
    """Make the learner durable; only then is what it consumed counted as trained."""
    checkpoint.save(
        learner.run_dir.checkpoints,
        model=learner.model,
        optimizer=learner.optimizer,
        schedule=learner.schedule,
        progress=learner.progress,
        ranks=learner.ranks,
        keep=learner.config.learner.keep_checkpoints,
    )
    if lead:
        lead.settle(learner.progress)


def _finish(learner: Learner, lead: Lead | None, shutdown: Shutdown) -> bool:
    """Export the model, evaluate it, and sum up; False when told to stop before the evaluation was done."""
    save_hf(learner.model, learner.run_dir.trained_model, ranks=learner.ranks)
    if lead:
        if learner.config.eval.num_tasks:
            evaluation = lead.open_evaluation(learner.progress.policy_version)
            if not lead.close_evaluation(evaluation, "final", step=learner.progress.step, shutdown=shutdown):
                return False
        lead.write_summary()
        lead.finish()
    return True
