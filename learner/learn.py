"""The learner's main loop: consumes groups, produces policy versions.

    claim(step) -> archive -> advantages -> packs -> one optimizer step -> publish -> checkpoint ... settle

It waits for actors only when it has no batch, and for the disk only while the previous checkpoint is being written.
A group counts as trained only when the archive and a checkpoint that covers its step are durable. Only rank 0 uses
Redis. `slipstream.learner.rerun` makes the same steps from the archive.
"""

import logging
from dataclasses import dataclass, field

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import own_address
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.checkpoint.conditions import conditions_of
from slipstream.learner.lead.connections import Connections, join
from slipstream.learner.lead.follower import Follower
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
from slipstream.learner.model.probe_score import probe_of
from slipstream.learner.publisher.messages import PublisherSettings
from slipstream.learner.publisher.published import Published, adapted_folder
from slipstream.learner.publisher.version_writer import VersionWriter
from slipstream.learner.ranks.ranks import Ranks, resolve_dtype, share
from slipstream.learner.rerun import catch_up
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.stall_guard import StallGuard
from slipstream.learner.supply.shared_batch import shared_batch
from slipstream.learner.supply.supply import Supply
from slipstream.replay.fleet.bulletin import BROADCAST_TIMEOUT_S
from slipstream.replay.records.keys import FencedOut

log = logging.getLogger(__name__)


def learn(config: Config, run_dir: RunDir, *, ranks: Ranks, shutdown: Shutdown) -> bool:
    """Train until `learner.steps`, or until the tasks are solved or a stop is requested; return whether it is finished.

    Every rank calls it. Raises ConfigError, RedisAway, SupplyDried, NothingLearned, AllRefuse, ArchiveError, FencedOut.
    """
    resolve_dtype(config.model, ranks.device)
    joined: Connections | Follower = join(config, run_dir, shutdown) if ranks.rank == 0 else Follower()
    try:
        learner = load_learner(config, run_dir, ranks, check=joined.check_epochs)
        _recover(learner)
        published = Published(learner.model, dtype=config.model.dtype, hosts=config.learner.hosts)
        lead = joined if isinstance(joined, Follower) else _take_the_lead(learner, joined, published)
    except FencedOut:
        raise
    except BaseException:
        joined.give_up()
        raise
    learner.progress = share(lead.with_fresh_version(learner.progress), Progress, ranks=ranks)
    supply = None
    if not isinstance(lead, Follower):
        first_group_id = learner.progress.next_group_id
        supply = Supply(
            lead.connections.train, config, first_group_id=first_group_id, refusals=lead.refusals, found=lead.found
        )
    versions = VersionWriter(published, ranks=ranks, publisher=lead.publisher)
    try:
        return Training(learner=learner, lead=lead, versions=versions, supply=supply, shutdown=shutdown).run()
    except FencedOut:
        raise  # another learner has taken over the run: do not set its state
    except BaseException:
        joined.give_up()
        raise
    finally:
        learner.checkpoints.close()
        versions.close()
        lead.close()


@dataclass(kw_only=True, slots=True)
class Training:
    """The steps of a run. Every rank has one and calls the same methods; what only rank 0 does is in `lead`."""

    learner: Learner
    lead: Lead | Follower
    versions: VersionWriter
    supply: Supply | None  # rank 0's
    shutdown: Shutdown
    stall_guard: StallGuard = field(default_factory=StallGuard)

    def run(self) -> bool:
        """Train from the first publish to the export; return whether the run is finished."""
        learner, num_steps = self.learner, self.learner.config.learner.steps
        self._publish()
        if not learner.has_checkpoint and not self._warm_up():
            return False
        begin(learner)
        if learner.progress.step == 0:
            name = "warm_start" if learner.config.warm_start.episodes else "initial"
            self.lead.evaluate_once(learner.progress, name, self.shutdown)
        self._checkpoint()
        if learner.progress.step >= num_steps:
            log.info("the run is already finished: %d of %d steps", learner.progress.step, num_steps)
        self.lead.train_from_here()
        clock = Clock(learner.ranks.device)
        while learner.progress.step < num_steps and not self.stall_guard.is_solved:
            if not self._step(clock):
                break
        made_all, is_solved = learner.progress.step >= num_steps, self.stall_guard.is_solved
        if is_solved and learner.progress.highest_published < learner.progress.policy_version:
            self._publish()
        self._checkpoint()
        learner.checkpoints.wait()
        return (made_all or is_solved) and self._finish()

    def _step(self, clock: Clock) -> bool:
        """Make one optimizer step, from claim to checkpoint, and tell the guard of it; return whether it was made.

        Not if a stop was requested before its batch was complete, or if the tasks are solved: no group teaches
        anything. The step is recorded before its checkpoint, so the record of the next step contains the time of the
        checkpoint.
        """
        learner, before, config = self.learner, self.learner.progress, self.learner.config
        learner.checkpoints.raise_failure()
        batch = shared_batch(self.supply, before, self.shutdown, ranks=learner.ranks)
        clock.lap("wait")
        if batch is None:
            return False
        if not batch.groups:
            self.stall_guard.end_as_solved(before.step)
            return False
        self.lead.archive(batch, before)
        clock.lap("archive")
        batch = scored(learner, batch)
        metrics = train_on(learner, batch, clock)
        step, is_last = learner.progress.step, learner.progress.step == config.learner.steps
        if step % config.learner.publish_every == 0 or is_last:
            self._publish()
        clock.lap("publish")
        self.lead.evaluate_regularly(learner.progress)
        clock.lap("evaluate")
        self.lead.record_step(batch, metrics, before, clock.take())
        clock.lap("record")
        if step % config.learner.checkpoint_every == 0 or is_last:
            self._checkpoint()
        clock.lap("checkpoint")
        if step > config.objective.critic_warmup_steps:
            self.stall_guard.after(step, metrics, batch.groups)
        return True

    def _warm_up(self) -> bool:
        """Evaluate the initial model, and imitate the expert while the actors play that evaluation.

        False if a stop was requested during the imitation: nothing of it is kept, and a resumed learner repeats it.
        """
        learner = self.learner
        if learner.config.warm_start.episodes:
            initial = self.lead.open_evaluation(learner.progress)
            num_steps = imitate_expert(learner, learner.run_dir.demonstrations, self.shutdown)
            if num_steps is None:
                return False
            self.lead.close_evaluation(initial, "initial", self.shutdown)
            version = learner.progress.policy_version + num_steps
            learner.progress = msgspec.structs.replace(learner.progress, policy_version=version)
            self._publish()
        return True

    def _publish(self) -> None:
        """Publish the current weights."""
        learner, version = self.learner, self.learner.progress.policy_version
        self.lead.reserve_version(version)
        probe = probe_of(learner.model, learner.ranks.device)
        self.versions.publish(policy_version=version, probe=probe)
        learner.progress = msgspec.structs.replace(learner.progress, highest_published=version)

    def _checkpoint(self) -> None:
        """Sync the archive and begin a checkpoint; its steps count as trained once it is durable.

        A step's checkpoint is not written twice: a crash during the second time could leave none. Raises the error of
        the previous checkpoint: ValueError, FencedOut.
        """
        learner = self.learner
        if learner.checkpoint_step < learner.progress.step:
            learner.checkpoints.wait()  # so that nothing waits between the check for another learner and the write
            begin_checkpoint(learner, self.lead.prepare_checkpoint(learner.progress))

    def _finish(self) -> bool:
        """Export and evaluate the model, and write the summary; False if a stop was requested during the evaluation.

        Raises ConfigError, after the evaluation, for an export that differs from the model.
        """
        failure: ConfigError | None = None
        try:
            export(self.learner)
        except ConfigError as error:
            failure = error
            log.error("the run ends with an error after its last evaluation: %s", error)
        evaluation = self.lead.open_evaluation(self.learner.progress)
        if not self.lead.close_evaluation(evaluation, "final", self.shutdown):
            return False
        self.lead.write_summary()
        if failure is not None:
            raise failure
        self.lead.finish()
        return True


def _recover(learner: Learner) -> None:
    """Make settled steps again if their checkpoint is lost. Every rank calls it. Raises ConfigError.

    It must run before rank 0 takes the lead: that makes the groups ready again that no checkpoint covers.
    """
    durable_step = load_tally(learner.run_dir.tally).durable_step
    if durable_step and not learner.has_checkpoint:
        raise ConfigError(
            f"{learner.run_dir.checkpoints} contains no checkpoint, but {durable_step} steps count as trained; restore "
            "one from a copy, or train again from the archive in a new run with `slipstream learner --replay-archive`"
        )
    if learner.progress.step < durable_step:
        catch_up(learner, durable_step=durable_step)


def _take_the_lead(learner: Learner, connections: Connections, published: Published) -> Lead:
    config = learner.config
    tokenizer = load_tokenizer(learner.model.folder, config.model.template_arguments)
    publishing = PublisherSettings(
        entries=published.layout,
        adapted=adapted_folder(learner.model),
        model_folder=str(learner.model.folder),
        model_files=connections.model_files,
        redis_url=config.redis.url,
        run_id=config.run.name,
        learner_epoch=connections.epoch,
        host=own_address(config.weights.host, config.redis.url),
        broadcast_timeout_s=BROADCAST_TIMEOUT_S,
        device=learner.ranks.device.type,
    )
    return Lead(
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
