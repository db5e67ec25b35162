"""The record of a run: metrics of each step and evaluation, the totals over all steps, and the summary."""

import contextlib
import dataclasses
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.process.headline import headline, held_out, progress_line, wilson
from slipstream.common.process.metrics import NUM_NEWEST, Metrics, MetricsWriter, Sample, newest_metrics
from slipstream.common.process.output import write_json
from slipstream.common.process.redis_retry import RedisAway
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.checkpoint.fence import Fence
from slipstream.learner.lead.advice import MEMORY, StepLoad, advised_actors
from slipstream.learner.lead.connections import Connections
from slipstream.learner.lead.cost import cost_of
from slipstream.learner.lead.evaluation import Evaluation
from slipstream.learner.lead.fleet_watch import FleetWatch
from slipstream.learner.lead.overview import describe, place_of
from slipstream.learner.lead.report import (
    add_cost,
    add_fleet,
    add_flow,
    add_produced,
    add_publishing,
    slots_used,
    step_metrics,
)
from slipstream.learner.lead.tally import EvalResult, Tally
from slipstream.learner.model.flops import Flops
from slipstream.learner.publisher.publish import PublishStats
from slipstream.learner.step.step_metrics import StepMetrics
from slipstream.learner.supply.refusals import Refusals
from slipstream.replay.fleet.fleet import Census, Member
from slipstream.replay.records.ledger import Ledger

SAMPLES_EVERY = 10  # steps
READING_SHARE = 0.005  # of the time, at most, is spent on reading the fleet, however large it is

log = logging.getLogger(__name__)


class RunRecord:
    """Writes the metrics of a run, and counts in `tally` what its steps add."""

    def __init__(
        self,
        connections: Connections,
        run_dir: RunDir,
        fence: Fence,
        *,
        tally: Tally,
        step: int,
        started_at_s: float,
        flops: Flops,
        config: Config,
        decode: Callable[[list[int]], str],
    ) -> None:
        """Remove the metrics of every step after `step`; later steps add to the rest. Raises FencedOut.

        `decode` makes text of tokens.
        """
        with fence.held():
            self._writer = MetricsWriter(
                run_dir, resume_step=step, place=place_of, describe=describe, check=fence.check
            )
        self.tally = tally
        self._connections = connections
        self._run_dir = run_dir
        self._started_at_s = started_at_s
        self._flops = flops
        self._last_full_step = config.last_full_step
        self._decode = decode
        self._newest: tuple[Mapping[str, float], ...] = ()  # records of steps; replaced, as the watch reads it
        self.watch = FleetWatch(
            connections,
            config,
            run_dir.tensorboard,
            started_at_s=started_at_s,
            tokens_trained=lambda: self.tally.tokens_trained,
            steps=lambda: self._newest,
        )
        self._census: Census | None = None  # the newest reading; how long it took, and when, by the monotonic clock
        self._reading_s = self._read_at = 0.0
        self._loads: deque[StepLoad] = deque(maxlen=MEMORY)
        self._reset_ledger(connections.train.ledger())

    def write_step(
        self,
        batch: Batch,
        step: StepMetrics,
        *,
        before: Progress,
        times_s: dict[str, float],
        publish: PublishStats,
        refusals: Refusals,
    ) -> None:
        """Write the metrics of the step that followed `before`, and log one line."""
        metrics = step_metrics(batch, step, before=before, times_s=times_s, flops=self._flops, tally=self.tally)
        ledger, census = self._connections.train.ledger(), self._fleet()
        actors = census.alive
        self._reset_ledger(ledger)
        add_produced(metrics, self.tally.recorded, ledger)
        add_flow(metrics, batch, self.tally.recorded, ledger)
        add_fleet(metrics, ledger=ledger, actors=actors)
        add_publishing(metrics, actors=actors, publish=publish)
        add_cost(metrics, cost_of(census, ledger=ledger, tokens_trained=self.tally.tokens_trained))
        metrics.add("fleet/unreadable_members", self._connections.fleet.num_unreadable)
        metrics.add("fleet/refusing_actors", refusals.log_new(actors))
        metrics.add("replay/repairs", ledger.repairs)
        metrics.add("fleet/advised_actors", self._advise(ledger, actors, times_s))
        self.tally.recorded = ledger
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        metrics.samples = episode_samples(trajectories, self._decode, step=before.step + 1)
        means = self._writer.write(before.step + 1, metrics)
        record = {"step": before.step + 1, "time": time.time()} | means
        with contextlib.suppress(RedisAway):  # the step is made and written; viewers elsewhere see the next one
            self._connections.fleet.report_step(record)
        self._newest = (*self._newest, record)[-NUM_NEWEST:]
        if self.tally.first_reward_s is None:
            self.tally.first_reward_s = time.time() - self._started_at_s
        log.info("%s", progress_line(self._newest))

    def write_evaluation(self, evaluation: Evaluation, result: EvalResult, name: str) -> None:
        """Write the metrics of an evaluation, and log one line."""
        metrics = Metrics()
        metrics.add("eval/success_sampled", result.sampled)
        metrics.add("eval/success_greedy", result.greedy)
        low, high = wilson(result.sampled, result.num_tasks)
        metrics.add("eval/success_low", low)
        metrics.add("eval/success_high", high)
        metrics.add("eval/num_tasks", result.num_tasks)
        for label in result.sampled_in:
            metrics.add(f"eval/success_sampled_in_{label}", result.sampled_in[label])
            metrics.add(f"eval/success_greedy_in_{label}", result.greedy_in.get(label, 0.0))
        metrics.add("eval/num_mixed", evaluation.num_mixed)
        metrics.add("eval/lasted_s", evaluation.lasted_s)
        means = self._writer.write(evaluation.step, metrics)
        log.info("evaluation %s: success %s, of %d tasks", name, held_out(means), result.num_tasks)

    def write_summary(self) -> None:
        """Write `summary.json`: evaluations, throughput, cost and lag of the whole run."""
        tally, wall_s = self.tally, time.time() - self._started_at_s
        ledger, census = self._connections.train.ledger(), self._connections.fleet.census()
        newest = headline(newest_metrics(self._run_dir.metrics), until=self._last_full_step)
        summary = {
            "eval": msgspec.to_builtins(tally.evaluations),
            "eval_during": msgspec.to_builtins(tally.evaluations_during),
            "ledger": ledger.to_dict(),
            "lag": dict(sorted(tally.lag.items(), key=lambda item: int(item[0]))),
            "tokens_per_s": {
                "generated": sum(actor.generated_tokens for actor in census.everyone) / wall_s,
                "trained": tally.tokens_trained / max(tally.seconds, 1e-9),
            },
            "produced": dataclasses.asdict(newest) if newest else None,
            "cost": dataclasses.asdict(cost_of(census, ledger=ledger, tokens_trained=tally.tokens_trained)),
            "first_reward_s": tally.first_reward_s,
            "wall_s": wall_s,
            "run_dir": str(self._run_dir.path),
        }
        write_json(self._run_dir.summary, summary)

    def close(self) -> None:
        self.watch.close()
        self._writer.close()

    def _fleet(self) -> Census:
        """The processes of the run; of a large fleet they are those of a few seconds ago."""
        now = time.monotonic()
        if self._census is None or now - self._read_at > self._reading_s / READING_SHARE:
            self._census = self._connections.fleet.census()
            self._reading_s, self._read_at = time.monotonic() - now, now
        return self._census

    def _advise(self, ledger: Ledger, actors: Sequence[Member], times_s: dict[str, float]) -> int:
        """The advised number of actors, including the measurements of this step."""
        load = StepLoad(
            num_actors=len(actors),
            learner_wait=times_s["wait"] / sum(times_s.values()),
            slots_used=slots_used(actors),
            has_queue=ledger.queued > 0,
        )
        self._loads.append(load)
        return advised_actors(list(self._loads))

    def _reset_ledger(self, ledger: Ledger) -> None:
        """Start counting at `ledger` if its counters went back: the server was emptied, or its ledger was repaired."""
        if ledger.inserted < self.tally.recorded.inserted:
            self.tally.recorded = ledger


def episode_samples(
    trajectories: Sequence[Trajectory], decode: Callable[[list[int]], str], *, step: int
) -> list[Sample]:
    """Three episodes of `step` as text: the best, the worst, and one at random.

    None except for every SAMPLES_EVERY-th step and the first one.
    """
    if step != 1 and step % SAMPLES_EVERY:
        return []
    chosen = {
        "best": max(trajectories, key=lambda trajectory: trajectory.total_reward),
        "worst": min(trajectories, key=lambda trajectory: trajectory.total_reward),
        "random": random.Random(step).choice(trajectories),
    }
    now_s = time.time()
    return [
        Sample(
            step=step,
            time=now_s,
            which=which,
            task_id=trajectory.task.task_id,
            total_reward=trajectory.total_reward,
            success=trajectory.success,
            num_turns=len(trajectory.turns),
            text=_text(trajectory, decode),
        )
        for which, trajectory in chosen.items()
    ]


def _text(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> str:
    head = (
        f"{trajectory.task.task_id}: group {trajectory.group_id}, member {trajectory.member}; "
        f"return {trajectory.total_reward:.4g}, {'success' if trajectory.success else 'no success'}, "
        f"{len(trajectory.turns)} turns, {trajectory.num_tokens} tokens, "
        f"versions {trajectory.oldest_policy_version} to {trajectory.newest_policy_version}"
    )
    return f"{head}\n\n{decode(trajectory.token_array().tolist())}"
