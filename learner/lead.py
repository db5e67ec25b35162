"""What rank 0 does besides training: the ledger, the offers, the evaluations, and what people watch."""

import contextlib
import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import torch

from common.config import Config
from common.metrics import Metrics, MetricsWriter
from common.patience import RedisAway
from common.run_dir import RunDir, write_json
from common.shutdown import Shutdown
from common.weights import Adapted, TensorEntry
from learner.advice import WINDOW, Reading, advised_actors
from learner.checkpoint import Progress
from learner.cost import Cost, cost_of
from learner.evaluation import Evaluation, RegularEvaluation
from learner.model.flops import Flops
from learner.links import Links
from learner.overview import OVERVIEW
from learner.publish import Publisher
from learner.report import add_cost, add_flow, add_system, slots_used, step_metrics
from learner.step_metrics import StepMetrics
from learner.supply import Batch
from learner.tally import EvalDuring, EvalResult, Tally, load_tally, save_tally
from replay.archive import ArchivedStep, ArchiveWriter
from replay.buffer import Buffer
from replay.fleet import Member, RunState
from replay.ledger import Ledger
from replay.shards import Epochs

log = logging.getLogger(__name__)


class Lead:
    """Rank 0's duties. What it writes and publishes is the run's only truth; the other ranks only compute."""

    def __init__(
        self,
        links: Links,
        config: Config,
        run_dir: RunDir,
        *,
        progress: Progress,
        conditions: dict[str, str],
        weights: list[TensorEntry],
        adapted: Adapted | None,
        redis_url: str,
        device: str,
        flops: Flops,
    ) -> None:
        self._flops = flops
        self._links = links
        self._config = config
        self._run_dir = run_dir
        self._started_at_s = run_dir.start_clock()
        self._tally = load_tally(run_dir.tally)
        self._conditions = conditions
        last_step = max((during.step for during in self._tally.evaluations_during), default=0)
        self._regular = RegularEvaluation(links.evaluation, config, last_step=last_step)
        self._archive = ArchiveWriter(run_dir.trajectories, config.run.name, epoch=links.epoch)
        self._archive.cut_after(progress.step)
        # What steps up to the checkpoint's had claimed is in these weights; what later ones had is in none.
        links.shards.settle(progress.step)
        self._settled_step = progress.step
        num_reopened = links.shards.reopen(progress.step)
        if num_reopened:
            log.info("%d groups of steps after %d are ready again", num_reopened, progress.step)
        self._writer = MetricsWriter(jsonl=run_dir.metrics, tensorboard=run_dir.tensorboard, resume_step=progress.step)
        self._writer.lay_out(OVERVIEW)
        self._ledger = links.shards.ledger()  # at the last record
        self._readings: deque[Reading] = deque(maxlen=WINDOW)
        self._publisher = Publisher(
            weights,
            adapted=adapted,
            disk=config.weights.disk,
            redis_url=redis_url,
            run_id=config.run.name,
            learner_epoch=links.epoch,
            host=config.weights.host,
            chunk_bytes=config.weights.chunk_bytes,
            anchor_every=config.weights.anchor_every,
            fan_out=config.weights.fan_out,
            pull_bytes_per_s=config.weights.pull_bytes_per_s,
            broadcast_timeout_s=config.weights.broadcast_timeout_s,
            log_path=run_dir.log("publisher"),
            device=device,
        )

    @property
    def epochs(self) -> Epochs:
        """What this learner holds of each shard."""
        return self._links.epochs

    @property
    def shards(self) -> list[Buffer]:
        """The training stream's buffers."""
        return self._links.shards.buffers

    def with_fresh_version(self, progress: Progress) -> Progress:
        """`progress` with a version above every published one, so that no number ever names two sets of weights."""
        latest = self._links.bulletin.latest()
        highest = latest.manifest.policy_version if latest else progress.highest_published
        version = progress.policy_version if highest < 0 else max(progress.policy_version, highest) + 1
        return msgspec.structs.replace(progress, policy_version=version)

    def archive(self, batch: Batch, before: Progress) -> None:
        """Write down what the step that follows `before` is trained on. Raises ArchiveError."""
        if self._config.replay.archive:
            step = ArchivedStep(
                step=before.step + 1,
                policy_version=before.policy_version,
                conditions=self._conditions,
                groups=batch.groups,
            )
            self._archive.append(step)

    def prepare_checkpoint(self, progress: Progress) -> Callable[[], None]:
        """Make durable what was archived, and make sure that the run is still ours.

        Return what settles the steps that the checkpoint covers, to be called in any thread once it is durable.
        A learner that stood still while another took over must not write over the other's checkpoints. Raises
        ArchiveError, FencedOut.
        """
        self._archive.sync()
        try:
            self._links.shards.settle(self._settled_step)  # nothing is left to settle: it asks the fence
        except RedisAway as error:
            log.warning("a checkpoint is written without knowing whether another learner has taken over: %s", error)
        return partial(self._settle, progress.step, copy.deepcopy(self._tally))

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        self._publisher.publish(tensors, policy_version=policy_version)

    def train_from_here(self) -> None:
        """Tell everyone that tickets and weights are coming."""
        self._links.fleet.set_run_state(RunState.TRAINING)

    def open_evaluation(self, progress: Progress) -> Evaluation:
        """Have the weights of `progress`, the newest on offer, tried on held-out tasks."""
        return Evaluation(self._links.evaluation, self._config, progress)

    def has_evaluated(self, name: str) -> bool:
        return name in self._tally.evaluations

    def close_evaluation(self, evaluation: Evaluation, name: str, shutdown: Shutdown) -> bool:
        """Wait for the result and write it down as `name`; False when told to stop before it is there."""
        result = evaluation.finish(shutdown)
        if result is None:
            return False
        self._tally.evaluations[name] = result
        self._record_evaluation(evaluation, result, name)
        return True

    def evaluate_regularly(self, progress: Progress) -> None:
        """Once a step: look at the evaluation that is made while training goes on, and begin one that is due."""
        evaluation = self._regular.tend(progress)
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
        """Write everything about the step that followed `before`, and one line for people."""
        metrics = step_metrics(
            batch, step, policy_version=before.policy_version, times_s=times_s, flops=self._flops, tally=self._tally
        )
        ledger, members = self._links.shards.ledger(), self._links.fleet.members()
        add_flow(metrics, batch, self._ledger, ledger, group_size=self._config.replay.group_size)
        add_system(metrics, ledger=ledger, members=members, publish=self._publisher.stats)
        add_cost(metrics, self._cost(ledger, members))
        metrics.add("fleet/advised_actors", self._advise(ledger, members, times_s))
        self._ledger = ledger
        means = self._writer.write(before.step + 1, metrics)
        if self._tally.first_reward_s is None:
            self._tally.first_reward_s = time.time() - self._started_at_s
        log.info(
            "step %d reward %.3f success %.3f lag %.1f waited %.1f of %.1f s",
            before.step + 1, means["reward/mean"], means["reward/success"], means["lag/mean"],
            times_s["wait"], sum(times_s.values()),
        )  # fmt: skip

    def _cost(self, ledger: Ledger, members: Sequence[Member]) -> Cost:
        everyone = self._links.fleet.everyone()
        return cost_of(everyone, alive=members, ledger=ledger, tokens_trained=self._tally.tokens_trained)

    def _advise(self, ledger: Ledger, members: Sequence[Member], times_s: dict[str, float]) -> int:
        """How many actors there should be, with the step that took `times_s` in mind as well."""
        actors = [member for member in members if member.role == "actor"]
        reading = Reading(
            num_actors=len(actors),
            learner_wait=times_s["wait"] / sum(times_s.values()),
            slots_used=slots_used(actors),
            has_queue=ledger.queued > 0,
        )
        self._readings.append(reading)
        fleet = self._config.fleet
        return advised_actors(list(self._readings), min_actors=fleet.min_actors, max_actors=fleet.max_actors)

    def write_summary(self) -> None:
        """What a person judges the run by."""
        tally, wall_s = self._tally, time.time() - self._started_at_s
        ledger, fleet = self._links.shards.ledger(), self._links.fleet
        actors = [member for member in fleet.everyone() if member.role == "actor"]
        summary = {
            "eval": msgspec.to_builtins(tally.evaluations),
            "eval_during": msgspec.to_builtins(tally.evaluations_during),
            "ledger": ledger.to_dict(),
            "lag": dict(sorted(tally.lag.items(), key=lambda item: int(item[0]))),
            "tokens_per_s": {
                "generated": sum(actor.generated_tokens for actor in actors) / wall_s,
                "trained": tally.tokens_trained / max(tally.seconds, 1e-9),
            },
            "cost": self._cost(ledger, fleet.members()).to_dict(),
            "first_reward_s": tally.first_reward_s,
            "wall_s": wall_s,
            "run_dir": str(self._run_dir.path),
        }
        write_json(self._run_dir.summary, summary)

    def finish(self) -> None:
        """Tell everyone that the run is done."""
        self._links.fleet.set_run_state(RunState.FINISHED)

    def fail(self) -> None:
        """Tell everyone that the learner ended with an error, so that no actor waits for it for ever."""
        with contextlib.suppress(RedisAway):
            self._links.fleet.set_run_state(RunState.FAILED)

    def close(self) -> None:
        for repertoire in self._links.repertoires:
            repertoire.close()
        self._publisher.close()
        self._writer.close()

    def _settle(self, step: int, tally: Tally) -> None:
        """A checkpoint that covers `step` is durable: what was claimed up to it is trained, for good. `tally` is as of
        that step; meanwhile others may have been made."""
        try:
            self._links.shards.settle(step)
            self._settled_step = step
        except RedisAway as error:
            log.warning("step %d is settled when a learner comes back: %s", step, error)
        save_tally(tally, self._run_dir.tally)
