"""Rank 0's duties besides training: archive, ledger, published weights, evaluations and metrics."""

import contextlib
import copy
import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import torch

from common.config import Config
from common.config_error import ConfigError
from common.headline import headline
from common.metrics import Metrics, MetricsWriter, read_metrics
from common.patience import RedisAway
from common.run_dir import RunDir, write_json
from common.shutdown import Shutdown
from common.weights import Adapted
from learner.advice import WINDOW, StepLoad, advised_actors
from learner.checkpoint import Progress
from learner.cost import Cost, cost_of
from learner.evaluation import Evaluation, RegularEvaluation
from learner.fence import Fence
from learner.links import Links
from learner.model.flops import Flops
from learner.overview import OVERVIEW
from learner.publish import Publisher
from learner.publisher.messages import PublisherSettings
from learner.report import add_cost, add_flow, add_produced, add_system, slots_used, step_metrics
from learner.step_metrics import StepMetrics
from learner.supply import Batch
from learner.tally import CURE, EvalDuring, EvalResult, Tally, load_tally, save_tally
from replay.archive import ArchivedStep, ArchiveWriter
from replay.fleet import Member, RunState
from replay.learner_buffer import LearnerBuffer
from replay.ledger import Ledger
from replay.shards import Epochs

log = logging.getLogger(__name__)


class Lead:
    """Rank 0's duties. Only rank 0 writes records and publishes weights; the other ranks only compute."""

    def __init__(
        self,
        links: Links,
        config: Config,
        run_dir: RunDir,
        *,
        tally: Tally,
        settled_step: int,
        started_at_s: float,
        archive: ArchiveWriter,
        writer: MetricsWriter,
        publisher: Publisher,
        conditions: dict[str, str],
        fence: Fence,
        flops: Flops,
    ) -> None:
        """`fence` is that of the run's checkpoints. `begin` makes one for a run."""
        self._links = links
        self._config = config
        self._run_dir = run_dir
        self._tally = tally
        self._settled_step = settled_step
        self._started_at_s = started_at_s
        self._archive = archive
        self._writer = writer
        self._publisher = publisher
        self._conditions = conditions
        self._fence = fence
        self._flops = flops
        last_step = max((during.step for during in tally.evaluations_during), default=0)
        self._regular = RegularEvaluation(links.evaluation, config, last_step=last_step)
        self._loads: deque[StepLoad] = deque(maxlen=WINDOW)

    @classmethod
    def begin(
        cls,
        links: Links,
        config: Config,
        run_dir: RunDir,
        *,
        progress: Progress,
        conditions: dict[str, str],
        publishing: PublisherSettings,
        fence: Fence,
        flops: Flops,
    ) -> "Lead":
        """Undo what was done after `progress` in the archive, the ledger and the metrics; start the publisher process.

        Raises ConfigError, FencedOut.
        """
        started_at_s, tally = run_dir.start_clock(), load_tally(run_dir.tally)
        if progress.step and not run_dir.tally.exists():
            raise ConfigError(f"{run_dir.tally} is missing, but {progress.step} steps have been made; {CURE}")
        _check_base(tally.base_root, publishing.adapted)
        tally.base_root = publishing.adapted.root if publishing.adapted else ""
        archive = ArchiveWriter(run_dir.trajectories, config.run.name, epoch=links.epoch)
        archive.cut_after(progress.step)
        # The weights contain what the steps up to the checkpoint claimed, and nothing that later steps claimed.
        links.shards.settle(progress.step)
        num_reopened = links.shards.reopen(progress.step)
        if num_reopened:
            log.info("%d groups claimed by steps after %d are ready again", num_reopened, progress.step)
        writer = MetricsWriter(jsonl=run_dir.metrics, tensorboard=run_dir.tensorboard, resume_step=progress.step)
        writer.lay_out(OVERVIEW)
        _reset_recorded_ledger(tally, links.shards.ledger())
        return cls(
            links,
            config,
            run_dir,
            tally=tally,
            settled_step=progress.step,
            started_at_s=started_at_s,
            archive=archive,
            writer=writer,
            publisher=Publisher(publishing, log_path=run_dir.log("publisher")),
            conditions=conditions,
            fence=fence,
            flops=flops,
        )

    @property
    def epochs(self) -> Epochs:
        """This learner's epoch on each shard."""
        return self._links.epochs

    @property
    def shards(self) -> list[LearnerBuffer]:
        """The training stream's buffers."""
        return self._links.shards.buffers

    def with_fresh_version(self, progress: Progress) -> Progress:
        """`progress` with a version above every published one, so that no version number is used twice."""
        offered = self._links.bulletin.highest_version()
        highest = offered if offered >= 0 else progress.highest_published
        version = progress.policy_version if highest < 0 else max(progress.policy_version, highest) + 1
        return progress.resumed_as(version)

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
        """Sync the archive to disk, and check that no other learner has taken over the run.

        Return a function that settles the steps that the checkpoint covers; any thread may call it once the checkpoint
        is durable. A learner that was suspended while another took over must not overwrite the other's checkpoints.
        Raises ArchiveError, FencedOut.
        """
        self._archive.sync()
        try:
            self._links.shards.settle(self._settled_step)  # settles nothing new: only checks the epoch
        except RedisAway as error:
            log.warning("writing a checkpoint without knowing whether another learner has taken over: %s", error)
        return partial(self._settle, progress.step, copy.deepcopy(self._tally))

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        self._publisher.publish(tensors, policy_version=policy_version)

    def train_from_here(self) -> None:
        """Set the run's state to TRAINING: actors may expect tickets and weights."""
        self._links.fleet.set_run_state(RunState.TRAINING)

    def open_evaluation(self, progress: Progress) -> Evaluation:
        """Open an evaluation of the weights of `progress`, which must be the newest published ones."""
        return Evaluation.begin(self._links.evaluation, self._config, progress)

    def has_evaluated(self, name: str) -> bool:
        return name in self._tally.evaluations

    def close_evaluation(self, evaluation: Evaluation, name: str, shutdown: Shutdown) -> bool:
        """Wait for the result and record it as `name`; False if a stop was requested before that."""
        result = evaluation.finish(shutdown)
        if result is None:
            return False
        self._tally.evaluations[name] = result
        self._record_evaluation(evaluation, result, name)
        return True

    def evaluate_regularly(self, progress: Progress) -> None:
        """Collect the evaluation that runs during training, and begin one if due; called once a step."""
        evaluation = self._regular.advance(progress)
        result = evaluation.result() if evaluation else None
        if evaluation and result:
            during = EvalDuring(
                step=evaluation.step, policy_version=evaluation.policy_version, **msgspec.structs.asdict(result)
            )
            self._tally.evaluations_during.append(during)
            self._record_evaluation(evaluation, result, f"at step {during.step}")

    def _record_evaluation(self, evaluation: Evaluation, result: EvalResult, name: str) -> None:
        metrics = Metrics()
        metrics.add("eval/success_sampled", result.sampled)
        metrics.add("eval/success_greedy", result.greedy)
        metrics.add("eval/num_tasks", result.num_tasks)
        for label in result.sampled_in:
            metrics.add(f"eval/success_sampled_in_{label}", result.sampled_in[label])
            metrics.add(f"eval/success_greedy_in_{label}", result.greedy_in.get(label, 0.0))
        metrics.add("eval/num_mixed", evaluation.num_mixed)
        metrics.add("eval/lasted_s", evaluation.lasted_s)
        self._writer.write(evaluation.step, metrics)
        log.info("evaluation %s: success %.3f sampled, %.3f greedy", name, result.sampled, result.greedy)

    def record_step(self, batch: Batch, step: StepMetrics, before: Progress, times_s: dict[str, float]) -> None:
        """Write the metrics of the step that followed `before`, and log one line."""
        metrics = step_metrics(batch, step, before=before, times_s=times_s, flops=self._flops, tally=self._tally)
        self._links.fleet.renew()
        ledger, members = self._links.shards.ledger(), self._links.fleet.members()
        _reset_recorded_ledger(self._tally, ledger)
        add_produced(metrics, self._tally.recorded, ledger)
        add_flow(metrics, batch, self._tally.recorded, ledger)
        add_system(metrics, ledger=ledger, members=members, publish=self._publisher.stats)
        add_cost(metrics, self._cost(ledger, members))
        metrics.add("fleet/unreadable_members", self._links.fleet.num_unreadable)
        metrics.add("replay/repairs", ledger.repairs)
        metrics.add("fleet/advised_actors", self._advise(ledger, members, times_s))
        self._tally.recorded = ledger
        means = self._writer.write(before.step + 1, metrics)
        if self._tally.first_reward_s is None:
            self._tally.first_reward_s = time.time() - self._started_at_s
        log.info(
            "step %d: %d episodes finished, reward %.3f, success %.3f; trained: reward %.3f, success %.3f; lag %.1f, "
            "waited %.1f of %.1f s",
            before.step + 1,
            means["produced/episodes"],
            means.get("produced/reward", math.nan),
            means.get("produced/success", math.nan),
            means["trained/reward"],
            means["trained/success"],
            means["lag/mean"],
            times_s["wait"],
            sum(times_s.values()),
        )

    def _cost(self, ledger: Ledger, members: Sequence[Member]) -> Cost:
        everyone = self._links.fleet.everyone()
        return cost_of(everyone, alive=members, ledger=ledger, tokens_trained=self._tally.tokens_trained)

    def _advise(self, ledger: Ledger, members: Sequence[Member], times_s: dict[str, float]) -> int:
        """The advised number of actors, including the measurements of this step."""
        actors = [member for member in members if member.role == "actor"]
        load = StepLoad(
            num_actors=len(actors),
            learner_wait=times_s["wait"] / sum(times_s.values()),
            slots_used=slots_used(actors),
            has_queue=ledger.queued > 0,
        )
        self._loads.append(load)
        return advised_actors(list(self._loads))

    def write_summary(self) -> None:
        """Write `summary.json`: evaluations, throughput, cost and lag of the whole run."""
        tally, wall_s = self._tally, time.time() - self._started_at_s
        ledger, fleet = self._links.shards.ledger(), self._links.fleet
        actors = [member for member in fleet.everyone() if member.role == "actor"]
        newest = headline(read_metrics(self._run_dir.metrics))
        summary = {
            "eval": msgspec.to_builtins(tally.evaluations),
            "eval_during": msgspec.to_builtins(tally.evaluations_during),
            "ledger": ledger.to_dict(),
            "lag": dict(sorted(tally.lag.items(), key=lambda item: int(item[0]))),
            "tokens_per_s": {
                "generated": sum(actor.generated_tokens for actor in actors) / wall_s,
                "trained": tally.tokens_trained / max(tally.seconds, 1e-9),
            },
            "produced": dataclasses.asdict(newest) if newest else None,
            "cost": self._cost(ledger, fleet.members()).to_dict(),
            "first_reward_s": tally.first_reward_s,
            "wall_s": wall_s,
            "run_dir": str(self._run_dir.path),
        }
        write_json(self._run_dir.summary, summary)

    def finish(self) -> None:
        """Set the run's state to FINISHED."""
        self._links.fleet.set_run_state(RunState.FINISHED)

    def fail(self) -> None:
        """Set the run's state to FAILED, so that no actor waits for the learner forever."""
        with contextlib.suppress(RedisAway):
            self._links.fleet.set_run_state(RunState.FAILED)

    def close(self) -> None:
        for repertoire in self._links.repertoires:
            repertoire.close()
        self._publisher.close()
        self._writer.close()

    def _settle(self, step: int, tally: Tally) -> None:
        """Settle all claims up to `step`, once a checkpoint that covers it is durable.

        `tally` is a copy from that step; training may have made later steps since. It is saved first: if the checkpoint
        is lost, the tally says which steps count as trained and must be made again.
        """
        tally.durable_step = step
        with self._fence.held():
            save_tally(tally, self._run_dir.tally)
        try:
            self._links.shards.settle(step)
            self._settled_step = step
        except RedisAway as error:
            log.warning("step %d is not settled yet; the next start will settle it: %s", step, error)


def _reset_recorded_ledger(tally: Tally, ledger: Ledger) -> None:
    """Start counting at `ledger` if its counters went back: the server was emptied, or its ledger was repaired."""
    if ledger.inserted < tally.recorded.inserted:
        tally.recorded = ledger


def _check_base(before: str, adapted: Adapted | None) -> None:
    """Raise ConfigError if the adapters were trained on other weights than those now in `model.path`."""
    if adapted and before not in ("", adapted.root):
        raise ConfigError(
            f"`model.path` contains other weights than those this run's adapters were trained on: their hash is "
            f"{adapted.root}, it was {before}; restore the folder from a copy, or choose another `run.name`"
        )
