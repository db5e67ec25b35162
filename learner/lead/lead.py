"""Rank 0's duties besides training: archive, ledger, the publisher, evaluations and metrics."""

import logging
from collections.abc import Callable
from functools import partial

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import sync_path
from slipstream.common.process.redis_retry import RedisAway
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.transfer.weights import Adapted
from slipstream.envhub.catalogue import num_held_out
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.checkpoint.fence import Fence
from slipstream.learner.lead.connections import Connections
from slipstream.learner.lead.evaluation import Evaluation, RegularEvaluation
from slipstream.learner.lead.run_record import RunRecord
from slipstream.learner.lead.tally import EvalDuring, load_highest_version, save_highest_version, save_tally, tally_at
from slipstream.learner.model.flops import Flops
from slipstream.learner.publisher.messages import PublisherSettings
from slipstream.learner.publisher.publish import Publisher
from slipstream.learner.publisher.slots import OwnRows
from slipstream.learner.step.step_metrics import StepMetrics
from slipstream.learner.supply.refusals import Refusals
from slipstream.replay.fleet.fleet import RunState
from slipstream.replay.run.archive import ArchivedStep, ArchiveWriter
from slipstream.replay.run.diagnosis import Diagnosis

log = logging.getLogger(__name__)


class Lead:
    """Rank 0's duties. Only rank 0 writes records and offers weights."""

    def __init__(
        self,
        connections: Connections,
        config: Config,
        run_dir: RunDir,
        *,
        progress: Progress,
        conditions: dict[str, str],
        publishing: PublisherSettings,
        own: OwnRows | None = None,
        fence: Fence,
        flops: Flops,
        decode: Callable[[list[int]], str],
    ) -> None:
        """Undo what was done after `progress` in the archive, the ledger and the metrics; start the publisher process.

        `own` are the rows of each version that rank 0 writes, None for all; `fence` is that of the run's checkpoints;
        `decode` makes text of tokens. Raises ConfigError, FencedOut.
        """
        started_at_s, tally = run_dir.start_clock(), tally_at(progress.step, run_dir)
        self._highest_version = load_highest_version(run_dir.highest_version)
        _check_base(tally.base_root, publishing.adapted)
        tally.base_root = publishing.adapted.root if publishing.adapted else ""
        self._archive = ArchiveWriter(run_dir.trajectories, config.run.name, epoch=connections.epoch, check=fence.check)
        with fence.held():
            self._archive.cut_after(progress.step)
            if progress.step or run_dir.next_tally.exists():  # before these steps are settled: see `_settle`
                save_tally(tally, run_dir.tally)
        # The weights contain what the steps up to the checkpoint claimed, and nothing that later steps claimed.
        connections.train.settle(progress.step)
        num_reopened = connections.train.reopen(progress.step)
        if num_reopened:
            log.info("%d groups claimed by steps after %d are ready again", num_reopened, progress.step)
        self.connections = connections
        self._config = config
        self._conditions = conditions
        self._run_dir, self._fence = run_dir, fence
        self._record = RunRecord(
            connections,
            run_dir,
            fence,
            tally=tally,
            step=progress.step,
            started_at_s=started_at_s,
            flops=flops,
            config=config,
            decode=decode,
        )
        self.publisher = Publisher(publishing, log_path=run_dir.log("publisher"), own=own)
        self.refusals = Refusals(connections.fleet, connections.bulletin)
        last_step = max((during.step for during in tally.evaluations_during), default=0)
        self._regular = RegularEvaluation(connections.evaluation, config, last_step=last_step)

    def found(self) -> Diagnosis | None:
        """The state of the run at a look of a few seconds ago; None before the first."""
        return self._record.watch.found

    def with_fresh_version(self, progress: Progress) -> Progress:
        """`progress` with a version above every published one, so that no version number is used twice."""
        offered = self.connections.bulletin.highest_version()  # -1 if the server came back empty
        highest = max(offered, self._highest_version, progress.highest_published)
        version = progress.policy_version if highest < 0 else max(progress.policy_version, highest) + 1
        return progress.resumed_as(version)

    def reserve_version(self, policy_version: int) -> None:
        """Write the number of a version to the run's folder, before the version is published. Raises FencedOut."""
        with self._fence.held():
            save_highest_version(policy_version, self._run_dir.highest_version)

    def archive(self, batch: Batch, before: Progress) -> None:
        """Archive the batch of the step that follows `before`. Raises ArchiveError."""
        if self._config.replay.archive:
            step = ArchivedStep(
                step=before.step + 1,
                policy_version=before.policy_version,
                resumptions=before.resumptions,
                conditions=self._conditions,
                groups=batch.groups,
            )
            self._archive.append(step)

    def prepare_checkpoint(self, progress: Progress) -> Callable[[], None]:
        """Sync archive and tally to disk, and check that no other learner has taken over the run.

        Return a function that settles the steps that the checkpoint covers; any thread may call it once the checkpoint
        is durable. A learner that was suspended while another took over must not overwrite the other's checkpoints.
        Raises ArchiveError, FencedOut.
        """
        self._archive.sync()
        try:
            self.connections.check_epochs()
        except RedisAway as error:
            log.warning("writing a checkpoint without knowing whether another learner has taken over: %s", error)
        with self._fence.held():
            tally = msgspec.structs.replace(self._record.tally, durable_step=progress.step)
            save_tally(tally, self._run_dir.next_tally)
        return partial(self._settle, progress.step)

    def train_from_here(self) -> None:
        """Set the run's state to TRAINING: actors may expect tickets and weights."""
        self.connections.fleet.set_run_state(RunState.TRAINING)

    def open_evaluation(self, progress: Progress) -> Evaluation | None:
        """Open an evaluation of the weights of `progress`, which must be the newest published ones.

        None if the run has no held-out tasks.
        """
        if not num_held_out(self._config):
            return None
        return Evaluation(self.connections.evaluation, self._config, progress)

    def evaluate_once(self, progress: Progress, name: str, shutdown: Shutdown) -> None:
        """Evaluate the weights of `progress`, unless `name` was evaluated before this learner resumed."""
        if name not in self._record.tally.evaluations:
            self.close_evaluation(self.open_evaluation(progress), name, shutdown)

    def close_evaluation(self, evaluation: Evaluation | None, name: str, shutdown: Shutdown) -> bool:
        """Wait for the result and record it as `name`; False if a stop was requested before that."""
        if evaluation is None:
            return True
        result = evaluation.finish(shutdown, self.refusals.check)
        if result is None:
            return False
        self._record.tally.evaluations[name] = result
        self._record.write_evaluation(evaluation, result, name)
        return True

    def evaluate_regularly(self, progress: Progress) -> None:
        """Collect the evaluation that runs during training, and begin one if due; called once a step."""
        evaluation = self._regular.advance(progress)
        result = evaluation.result() if evaluation else None
        if evaluation and result:
            during = EvalDuring(
                step=evaluation.step, policy_version=evaluation.policy_version, **msgspec.structs.asdict(result)
            )
            self._record.tally.evaluations_during.append(during)
            self._record.write_evaluation(evaluation, result, f"at step {during.step}")

    def record_step(self, batch: Batch, step: StepMetrics, before: Progress, times_s: dict[str, float]) -> None:
        """Write the metrics of the step that followed `before`; renew the heartbeat."""
        self.connections.fleet.renew()
        self._record.write_step(
            batch, step, before=before, times_s=times_s, publish=self.publisher.stats, refusals=self.refusals
        )

    def write_summary(self) -> None:
        self._record.write_summary()

    def finish(self) -> None:
        """Set the run's state to FINISHED."""
        self.connections.fleet.set_run_state(RunState.FINISHED)

    def close(self) -> None:
        self.connections.close()
        self.publisher.close()
        self._record.close()

    def _settle(self, step: int) -> None:
        """Settle all claims up to `step`, once a checkpoint that covers it is durable.

        The tally of that step comes first: if the checkpoint is lost, the tally says which steps count as trained and
        must be made again.
        """
        with self._fence.held():
            self._run_dir.next_tally.replace(self._run_dir.tally)
            sync_path(self._run_dir.path)
        try:
            self.connections.train.settle(step)
        except RedisAway as error:
            log.warning("step %d is not settled yet; the next start will settle it: %s", step, error)


def _check_base(before: str, adapted: Adapted | None) -> None:
    """Raise ConfigError if the adapters were trained on other weights than those now in `model.path`."""
    if adapted and before not in ("", adapted.root):
        raise ConfigError(
            f"`model.path` contains other weights than those this run's adapters were trained on: their hash is "
            f"{adapted.root}, it was {before}; restore the folder from a copy, or choose another `run.name`"
        )
