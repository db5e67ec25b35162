"""The learner's main loop: consumes groups, produces policy versions.

    claim(step) -> archive -> advantages -> packs -> one optimizer step -> publish -> checkpoint ... settle

It waits for actors only when it has no batch, and for the disk only while the previous checkpoint is being written.
A group counts as trained only when the archive and a checkpoint that covers its step are durable. Only rank 0 uses
Redis, except for claims: if there are several shards, other ranks claim from theirs. `slipstream.learner.rerun` makes
the same steps from the archive.
"""

import logging
from pathlib import Path

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect_shards
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.text.tokenizer import load_tokenizer, tokenizer_root
from slipstream.common.transfer.model_folder import model_files
from slipstream.envhub.catalogue import num_held_out
from slipstream.envhub.own_modules import own_modules
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.checkpoint.conditions import conditions_of
from slipstream.learner.lead.connections import Connections, join_run
from slipstream.learner.lead.lead import Lead
from slipstream.learner.lead.tally import load_tally
from slipstream.learner.learner import (
    Learner,
    begin,
    begin_checkpoint,
    export,
    imitate_expert,
    load_learner,
    scored,
    train_on,
)
from slipstream.learner.model.probe import probe_of
from slipstream.learner.model.skeleton import vocab_size_of
from slipstream.learner.publisher.publish import publisher_settings
from slipstream.learner.publisher.published import Published, adapted_folder
from slipstream.learner.publisher.version_writer import VersionWriter
from slipstream.learner.ranks.ranks import Ranks, resolve_dtype
from slipstream.learner.ranks.share import share
from slipstream.learner.rerun import catch_up
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.stall_guard import StallGuard
from slipstream.learner.supply.supplies import Supplies, shards_of, whole_batch
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.records.keys import FencedOut
from slipstream.replay.run.shards import Epochs

log = logging.getLogger(__name__)


def learn(config: Config, run_dir: RunDir, *, ranks: Ranks, shutdown: Shutdown) -> bool:
    """Train until `learner.steps`, or until the tasks are solved or a stop is requested; return whether it is finished.

    Every rank calls it. Raises ConfigError, RedisAway, SupplyDried, NothingLearned, AllRefuse, ArchiveError, FencedOut.
    """
    resolve_dtype(config, ranks.device)
    connections = _describe_run(config, run_dir, shutdown) if ranks.rank == 0 else None
    try:
        check = connections.check_epochs if connections else lambda: None
        learner, resumed = load_learner(config, run_dir, ranks, check=check)
        durable_step = learner.progress.step if resumed else None
        _recover(learner, resumed=resumed)
        published = Published(learner.model, dtype=config.model.dtype, hosts=config.learner.hosts)
        lead = _take_the_lead(learner, connections, published) if connections else None
    except FencedOut:
        raise
    except BaseException:
        if connections:
            connections.give_up()
        raise
    fresh = share(lead.with_fresh_version(learner.progress) if lead else None, Progress, ranks=ranks)
    assert fresh is not None
    learner.progress = fresh
    supplies = _supplies(learner, lead, shutdown)
    if supplies and config.env.repeat:
        supplies.load_tasks(run_dir)
    versions = VersionWriter(published, ranks=ranks, publisher=lead.publisher if lead else None)
    try:
        return _trained(learner, lead, versions, supplies, shutdown, durable_step=durable_step)
    except FencedOut:
        raise  # another learner has taken over the run: do not set its state
    except BaseException:
        if lead:
            lead.fail()
        raise
    finally:
        learner.checkpoints.close()
        versions.close()
        if lead:
            lead.close()


def _trained(
    learner: Learner,
    lead: Lead | None,
    versions: VersionWriter,
    supplies: Supplies | None,
    shutdown: Shutdown,
    *,
    durable_step: int | None,
) -> bool:
    """Train from the first publish to the export; return whether the run is finished.

    `durable_step` is the step of the checkpoint that it resumed from; None for a new run.
    """
    config = learner.config
    _publish(learner, lead, versions)
    if durable_step is None and not _warm_up(learner, lead, versions, shutdown):
        return False
    begin(learner)
    if durable_step is not None and durable_step < learner.progress.step:
        durable_step = learner.progress.step
        _checkpoint(learner, lead)
    if learner.progress.step == 0:
        _evaluate_start(learner, lead, shutdown)
        if durable_step is None:
            _checkpoint(learner, lead)
    if learner.progress.step >= config.learner.steps:
        log.info("the run is already finished: %d of %d steps", learner.progress.step, config.learner.steps)
    if lead:
        lead.train_from_here()
    clock, stall_guard = Clock(learner.ranks.device), StallGuard()
    while learner.progress.step < config.learner.steps and not stall_guard.is_solved:
        if not _step(learner, lead, versions, supplies, clock, stall_guard, shutdown):
            break
    step, made_all = learner.progress.step, learner.progress.step >= config.learner.steps
    if stall_guard.is_solved and learner.progress.highest_published < learner.progress.policy_version:
        _publish(learner, lead, versions)
    # The checkpoint that it resumed from is not written again: a crash while doing so would leave none.
    if not made_all and step % config.learner.checkpoint_every and step != durable_step:
        _checkpoint(learner, lead)
    learner.checkpoints.wait()
    return (made_all or stall_guard.is_solved) and _finish(learner, lead, shutdown)


def _recover(learner: Learner, *, resumed: bool) -> None:
    """Make settled steps again if their checkpoint is lost. Every rank calls it. Raises ConfigError.

    It must run before rank 0 takes the lead: that makes the groups ready again that no checkpoint covers.
    """
    durable_step = load_tally(learner.run_dir.tally).durable_step
    if durable_step and not resumed:
        raise ConfigError(
            f"{learner.run_dir.checkpoints} contains no checkpoint, but {durable_step} steps count as trained; restore "
            "one from a copy, or train again from the archive in a new run with `slipstream learner --replay-archive`"
        )
    if learner.progress.step < durable_step:
        catch_up(learner, durable_step=durable_step)


def _step(
    learner: Learner,
    lead: Lead | None,
    versions: VersionWriter,
    supplies: Supplies | None,
    clock: Clock,
    stall_guard: StallGuard,
    shutdown: Shutdown,
) -> bool:
    """Make one optimizer step, from claim to checkpoint, and tell `stall_guard` of it; return whether it was made.

    Not if a stop was requested before its batch was complete, or if the tasks are solved: no group teaches anything.
    The step is recorded before its checkpoint, so the record of the next step contains the time of the checkpoint.
    """
    learner.checkpoints.raise_failure()
    before, config = learner.progress, learner.config.learner
    part = supplies.next_batch(before, shutdown) if supplies else None
    batch = whole_batch(part, num_shards=learner.config.redis.num_shards, ranks=learner.ranks)
    clock.lap("wait")
    if batch is None:
        return False
    if not batch.groups:
        stall_guard.end_as_solved(before.step)
        return False
    if lead:
        lead.archive(batch, before)
    clock.lap("archive")
    batch = scored(learner, batch)
    metrics = train_on(learner, batch, clock)
    step, last = learner.progress.step, config.steps
    if step % config.publish_every == 0 or step == last:
        _publish(learner, lead, versions)
    clock.lap("publish")
    if lead:
        lead.evaluate_regularly(learner.progress)
        clock.lap("evaluate")
        lead.record_step(batch, metrics, before, clock.take())
    clock.lap("record")
    if step % config.checkpoint_every == 0 or step == last:
        _checkpoint(learner, lead)
        if supplies and learner.config.env.repeat:
            supplies.save_tasks(learner.run_dir)
    clock.lap("checkpoint")
    if step > learner.config.objective.critic_warmup_steps:
        stall_guard.after(step, metrics, batch.groups)
    return True


def _describe_run(config: Config, run_dir: RunDir, shutdown: Shutdown) -> Connections:
    """Become the run's learner before the model is loaded: actors load theirs meanwhile. Raises ConfigError."""
    folder = Path(config.model.path or run_dir.model)
    client, *further = connect_shards(config.redis.url, config.redis.shards, ending=shutdown.requested)
    vocab_size = vocab_size_of(folder)
    try:  # actors pull whole weights as a version, but adapters need the folder's
        files = model_files(folder, with_weights=config.model.lora.rank > 0)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return join_run(
        client,
        config,
        model_folder=folder,
        model_files=files,
        vocab_size=vocab_size,
        tokenizer_root=tokenizer_root(load_tokenizer(folder, config.model.template_arguments)),
        own_modules=own_modules(config.env),
        further=further,
    )


def _take_the_lead(learner: Learner, connections: Connections, published: Published) -> Lead:
    config = learner.config
    tokenizer = load_tokenizer(learner.model.folder, config.model.template_arguments)
    publishing = publisher_settings(
        config,
        entries=published.layout,
        adapted=adapted_folder(learner.model),
        model_folder=learner.model.folder,
        model_files=connections.model_files,
        learner_epoch=connections.epoch,
        device=learner.ranks.device.type,
    )
    return Lead.begin(
        connections,
        config,
        learner.run_dir,
        progress=learner.progress,
        conditions=conditions_of(config, ranks=learner.ranks),
        publishing=publishing,
        own=published.own,
        fence=learner.checkpoints.fence,
        flops=learner.flops,
        decode=lambda tokens: str(tokenizer.decode(tokens)),
    )


def _supplies(learner: Learner, lead: Lead | None, shutdown: Shutdown) -> Supplies | None:
    """The source of this rank's part of every batch; None if other ranks read all shards. Collective."""
    config, ranks, vocab_size = learner.config, learner.ranks, learner.model.vocab_size
    acquired = share(lead.epochs if lead else None, Epochs, ranks=ranks)
    mine = shards_of(ranks.rank, num_shards=config.redis.num_shards, num_ranks=ranks.num_ranks)
    if not mine:
        return None
    assert acquired is not None
    if lead:
        buffers = {shard: lead.shards[shard] for shard in mine}
        return Supplies.begin(buffers, config, progress=learner.progress, refusals=lead.refusals, found=lead.found)
    clients = connect_shards(config.redis.url, config.redis.shards, ending=shutdown.requested)
    buffers = {
        shard: LearnerBuffer(clients[shard], config.run.name, config.replay, vocab_size=vocab_size, shard=shard)
        for shard in mine
    }
    for shard, buffer in buffers.items():
        buffer.adopt_epoch(acquired.epochs[shard])
    return Supplies.begin(buffers, config, progress=learner.progress)


def _warm_up(learner: Learner, lead: Lead | None, versions: VersionWriter, shutdown: Shutdown) -> bool:
    """Evaluate the initial model, and imitate the expert while the actors play that evaluation.

    False if a stop was requested during the imitation: nothing of it is kept, and a resumed learner repeats it.
    """
    config = learner.config
    if config.warm_start.episodes:
        initial = lead.open_evaluation(learner.progress) if lead and num_held_out(config) else None
        num_steps = imitate_expert(learner, learner.run_dir.demonstrations, shutdown)
        if num_steps is None:
            return False
        if lead and initial:
            lead.close_evaluation(initial, "initial", shutdown)
        learner.progress = msgspec.structs.replace(
            learner.progress, policy_version=learner.progress.policy_version + num_steps
        )
        _publish(learner, lead, versions)
    return True


def _evaluate_start(learner: Learner, lead: Lead | None, shutdown: Shutdown) -> None:
    """Evaluate the model before reinforcement learning, unless it was evaluated before this learner resumed."""
    name = "warm_start" if learner.config.warm_start.episodes else "initial"
    if lead and num_held_out(learner.config) and not lead.has_evaluated(name):
        lead.close_evaluation(lead.open_evaluation(learner.progress), name, shutdown)


def _publish(learner: Learner, lead: Lead | None, versions: VersionWriter) -> None:
    """Publish the current weights. Every rank calls it."""
    version = learner.progress.policy_version
    if lead:
        lead.reserve_version(version)
    probe = probe_of(learner.model, learner.ranks.device, tolerance=learner.config.weights.probe_nats)
    versions.publish(policy_version=version, probe=probe)
    learner.progress = msgspec.structs.replace(learner.progress, highest_published=version)


def _checkpoint(learner: Learner, lead: Lead | None) -> None:
    """Sync the archive and begin a checkpoint; its steps count as trained once it is durable.

    Raises the error of the previous checkpoint: ValueError, FencedOut.
    """
    learner.checkpoints.wait()  # now, so that nothing waits between the check for another learner and the write
    if lead:
        begin_checkpoint(learner, lead.prepare_checkpoint(learner.progress))
    else:
        begin_checkpoint(learner)


def _finish(learner: Learner, lead: Lead | None, shutdown: Shutdown) -> bool:
    """Export and evaluate the model, and write the summary; False if a stop was requested during the evaluation."""
    export(learner)
    if lead:
        evaluation = lead.open_evaluation(learner.progress) if num_held_out(learner.config) else None
        if evaluation and not lead.close_evaluation(evaluation, "final", shutdown):
            return False
        lead.write_summary()
        lead.finish()
    return True
