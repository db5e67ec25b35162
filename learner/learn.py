"""The learner: groups in, policy versions out.

    claim(step) -> archive -> advantages -> packs -> one optimizer step -> publish -> checkpoint ... settle

It waits for actors only where it has no batch, and for the disk only where the checkpoint before is not written yet.
What it consumed counts as trained only when a checkpoint that covers the step is durable, and the archive before it.
Rank 0 alone talks to Redis, but for claims where there are shards enough for other ranks. `learner.rerun` makes the
same steps from the archive.
"""

import logging

import msgspec

from common.config import Config
from common.connection import connect_shards
from common.run_dir import RunDir
from common.shutdown import Shutdown
from learner.checkpoint import Progress
from learner.clock import Clock
from learner.conditions import conditions_of
from learner.lead import Lead
from learner.learner import Learner, begin, begin_checkpoint, export, imitate_expert, judged, load_learner, train_on
from learner.links import join_run, shard_buffer
from learner.publisher.published import adapted_folder, published_layout, published_tensors
from learner.ranks import Ranks
from learner.share import share
from learner.supplies import Supplies, shards_of, whole_batch
from replay.keys import FencedOut
from replay.shards import Epochs

log = logging.getLogger(__name__)


def learn(config: Config, run_dir: RunDir, *, ranks: Ranks, shutdown: Shutdown) -> bool:
    """Train until `learner.steps`, or until told to stop; return whether the run is finished.

    Every rank calls it. Raises ConfigError, RedisAway, SupplyDried, ArchiveError, FencedOut.
    """
    learner, resumed = load_learner(config, run_dir, ranks)
    durable_step = learner.progress.step if resumed else None
    lead = _take_the_lead(learner, shutdown) if ranks.rank == 0 else None
    fresh = share(lead.with_fresh_version(learner.progress) if lead else None, Progress, ranks=ranks)
    assert fresh is not None
    skipped_versions = fresh.policy_version - learner.progress.policy_version
    learner.progress = fresh
    supplies = _supplies(learner, lead, shutdown, skipped_versions=skipped_versions)
    try:
        _publish(learner, lead)
        if not resumed and not _warm_up(learner, lead, shutdown):
            return False
        begin(learner)
        if learner.progress.step == 0:
            _evaluate_start(learner, lead, shutdown)
            if durable_step is None:
                _checkpoint(learner, lead)
        if learner.progress.step >= config.learner.steps:
            log.info("nothing is left to do: %d steps of %d are made", learner.progress.step, config.learner.steps)
        if lead:
            lead.train_from_here()
        clock = Clock(ranks.device)
        while learner.progress.step < config.learner.steps and _step(learner, lead, supplies, clock, shutdown):
            pass
        finished = learner.progress.step >= config.learner.steps
        # What it was resumed from is not written anew: until that was done, there would be none.
        if (
            not finished
            and learner.progress.step % config.learner.checkpoint_every
            and (learner.progress.step != durable_step)
        ):
            _checkpoint(learner, lead)
        learner.checkpoints.wait()
        if finished:
            finished = _finish(learner, lead, shutdown)
    except FencedOut:
        raise  # the run is another learner's now, and its state is not ours to set
    except BaseException:
        if lead:
            lead.fail()
        raise
    finally:
        learner.checkpoints.close()
        if lead:
            lead.close()
    return finished


def _step(learner: Learner, lead: Lead | None, supplies: Supplies | None, clock: Clock, shutdown: Shutdown) -> bool:
    """One optimizer step, from the claim to the checkpoint; False when told to stop before its batch came.

    A step is recorded before its checkpoint, which covers it; so the time of a checkpoint is in the next one's record.
    """
    learner.checkpoints.raise_failure()
    before, config = learner.progress, learner.config.learner
    part = supplies.next_batch(before, shutdown) if supplies else None
    batch = whole_batch(part, num_shards=learner.config.redis.num_shards, ranks=learner.ranks)
    clock.lap("wait")
    if batch is None:
        return False
    if lead:
        lead.archive(batch, before)
    clock.lap("archive")
    batch = judged(learner, batch)
    metrics = train_on(learner, batch, clock)
    step, last = learner.progress.step, config.steps
    if step % config.publish_every == 0 or step == last:
        _publish(learner, lead)
    clock.lap("publish")
    if lead:
        lead.evaluate_regularly(learner.progress)
        clock.lap("evaluate")
        lead.record_step(batch, metrics, before, clock.take())
    clock.lap("record")
    if step % config.checkpoint_every == 0 or step == last:
        _checkpoint(learner, lead)
    clock.lap("checkpoint")
    return True


def _take_the_lead(learner: Learner, shutdown: Shutdown) -> Lead:
    config = learner.config
    client, *further = connect_shards(config.redis.url, config.redis.shards, ending=shutdown.requested)
    links = join_run(
        client, config, model_folder=learner.model.folder, vocab_size=learner.model.vocab_size, further=further
    )
    return Lead(
        links,
        config,
        learner.run_dir,
        progress=learner.progress,
        conditions=conditions_of(config, ranks=learner.ranks),
        weights=published_layout(learner.model, dtype=config.model.dtype),
        adapted=adapted_folder(learner.model),
        redis_url=config.redis.url,
        device=learner.ranks.device.type,
        flops=learner.flops,
    )


def _supplies(learner: Learner, lead: Lead | None, shutdown: Shutdown, *, skipped_versions: int) -> Supplies | None:
    """Where this rank's part of every batch comes from; None where other ranks read all shards. Collective."""
    config, ranks, vocab_size = learner.config, learner.ranks, learner.model.vocab_size
    held = share(lead.epochs if lead else None, Epochs, ranks=ranks)
    mine = shards_of(ranks.rank, num_shards=config.redis.num_shards, num_ranks=ranks.num_ranks)
    if not mine:
        return None
    assert held is not None
    if lead:
        buffers = {shard: lead.shards[shard] for shard in mine}
        return Supplies(buffers, config, progress=learner.progress, skipped_versions=skipped_versions)
    clients = connect_shards(config.redis.url, config.redis.shards, ending=shutdown.requested)
    buffers = {shard: shard_buffer(clients[shard], config, vocab_size=vocab_size, shard=shard) for shard in mine}
    for shard, buffer in buffers.items():
        buffer.adopt_epoch(held.epochs[shard])
    return Supplies(buffers, config, progress=learner.progress, skipped_versions=skipped_versions)


def _warm_up(learner: Learner, lead: Lead | None, shutdown: Shutdown) -> bool:
    """Evaluate what there is, and imitate the expert while the actors play that.

    False when told to stop in mid-imitation: then nothing of it is kept, and a resumed learner begins anew.
    """
    config = learner.config
    if config.warm_start.episodes:
        initial = lead.open_evaluation(learner.progress) if lead and config.eval.num_tasks else None
        num_steps = imitate_expert(learner, learner.run_dir.demonstrations, shutdown)
        if num_steps is None:
            return False
        if lead and initial:
            lead.close_evaluation(initial, "initial", shutdown)
        learner.progress = msgspec.structs.replace(
            learner.progress, policy_version=learner.progress.policy_version + num_steps
        )
        _publish(learner, lead)
    return True


def _evaluate_start(learner: Learner, lead: Lead | None, shutdown: Shutdown) -> None:
    """Evaluate what reinforcement learning begins with, unless that was done before this learner was resumed."""
    name = "warm_start" if learner.config.warm_start.episodes else "initial"
    if lead and learner.config.eval.num_tasks and not lead.has_evaluated(name):
        lead.close_evaluation(lead.open_evaluation(learner.progress), name, shutdown)


def _publish(learner: Learner, lead: Lead | None) -> None:
    """Offer the weights as they are. Gathering is collective; only rank 0 copies them out."""
    version = learner.progress.policy_version
    tensors = published_tensors(learner.model, dtype=learner.config.model.dtype)
    if lead:
        lead.publish(tensors, version)
    else:
        for _ in tensors:
            pass
    learner.progress = msgspec.structs.replace(learner.progress, highest_published=version)


def _checkpoint(learner: Learner, lead: Lead | None) -> None:
    """Begin to make the learner durable, its archive before it; what it consumed counts as trained once that is done.

    Raises what became of the checkpoint before: ValueError, FencedOut.
    """
    learner.checkpoints.wait()  # here already: between asking the fence and writing there is to be no wait
    if lead:
        begin_checkpoint(learner, lead.prepare_checkpoint(learner.progress))
    else:
        begin_checkpoint(learner)


def _finish(learner: Learner, lead: Lead | None, shutdown: Shutdown) -> bool:
    """Export the model, evaluate it, and sum up; False when told to stop before the evaluation was done."""
    export(learner)
    if lead:
        evaluation = lead.open_evaluation(learner.progress) if learner.config.eval.num_tasks else None
        if evaluation and not lead.close_evaluation(evaluation, "final", shutdown):
            return False
        lead.write_summary()
        lead.finish()
    return True
