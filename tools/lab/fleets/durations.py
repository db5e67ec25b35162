"""`make study-durations`: study long tasks among short ones, by how lag is counted.

The buffer, its server, admission, claims and tickets are those of a run. Actors play in virtual time, and a step of the
learner takes a given virtual time. So every number depends on the seed, and none on this machine.
"""

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from slipstream.common.config.config import Config, load_config
from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.connection import connect
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.objective.lag import BUCKETS, bucket_of
from slipstream.learner.supply.supply import Supply
from slipstream.learner.supply.task_order import task_index
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.buffer.audit import audit
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.buffer.listing import list_groups
from slipstream.replay.server.server import start_server
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.fleets.durations_page import NEW_RULE, OLD_RULE, PATIENT, QUICK, Result, Study, write
from slipstream.tools.lab.fleets.virtual_actors import Durations, VirtualActors

MAX_LAGS = (4, 8, 16, 32)  # of the new rule
LONG_SHARE = 0.3  # of the tasks
GROUP_SIZE, GROUPS_PER_STEP, NUM_ACTORS = 4, 8, 4
WARM_UP_STEPS = 20
HOUR_S = 3600.0
RUN = "durations"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run in virtual time."""

    rule: str
    max_lag: int
    target_lag: int
    long: float  # how much longer long tasks take than short ones
    step_units: float  # of virtual time that an optimizer step takes; a short episode takes 1
    num_steps: int  # measured after the warm-up; more if long tasks take longer than these steps
    seed: int

    def config(self) -> Config:
        return load_config(
            None,
            [
                f"replay.target_lag={self.target_lag}",
                f"replay.max_lag={self.max_lag}",
                f"run.seed={self.seed}",
                f"replay.group_size={GROUP_SIZE}",
                f"replay.groups_per_step={GROUPS_PER_STEP}",
                "learner.steps=1000000",
                f"learner.claim_timeout_s={24 * HOUR_S}",
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The state at the end of the warm-up, when the measured steps begin."""

    version: int
    time: float
    group_id: int  # of the first group opened afterwards
    waited: float  # virtual time that the learner has waited so far


def measure(cell: Cell, client: redis.Redis) -> Result:
    """Run the cell on an emptied server, and return its measurements."""
    client.flushdb()
    replay = ReplayConfig(lease_ttl_s=1000 * HOUR_S, max_attempts=1, max_trajectory_bytes=1 << 20)
    buffer = LearnerBuffer(client, RUN, replay, vocab_size=2)
    buffer.acquire_epoch()
    durations = Durations(long=cell.long, long_share=LONG_SHARE, seed=cell.seed)
    num_slots = GROUP_SIZE * GROUPS_PER_STEP * (cell.target_lag + 1)  # every admitted episode has a slot
    leasing = ActorBuffer(client, RUN, replay, vocab_size=2)
    actors = VirtualActors(leasing, RUN, durations, num_actors=NUM_ACTORS, num_slots=num_slots // NUM_ACTORS)
    learner = VirtualLearner(cell, buffer, actors)
    while learner.version < WARM_UP_STEPS or actors.now < 2 * cell.long:
        learner.step()
    start = Start(
        version=learner.version, time=actors.now, group_id=buffer.ledger().last_group_id + 1, waited=learner.waited
    )
    while learner.version < start.version + cell.num_steps or actors.now < start.time + 2 * cell.long:
        learner.step()
    assert audit(client, RUN) == []
    opened = range(start.group_id, buffer.ledger().last_group_id + 1)
    held = {group.group_id for group in list_groups(client, RUN)}
    return result_of(cell, start, learner, actors, durations, opened=opened, held=held)


class VirtualLearner:
    """Claims a batch, trains for the time of a step, and publishes; it waits for the next group of the actors."""

    def __init__(self, cell: Cell, buffer: LearnerBuffer, actors: VirtualActors) -> None:
        self.version = 0
        self.trained_at: dict[int, int] = {}  # version, by group id
        self.waited = 0.0  # virtual time
        self._cell, self._buffer, self._actors = cell, buffer, actors
        self._supply = Supply(buffer, cell.config(), first_group_id=0, sleep=self._wait)
        self._old_rule = OldRule(buffer, actors, max_lag=cell.max_lag) if cell.rule == OLD_RULE else None
        self._shutdown = Shutdown()

    def step(self) -> None:
        actors, began = self._actors, self._actors.now
        self._sweep()
        batch = self._supply.next_batch(
            self.version + 1, policy_version=self.version, published_version=self.version, shutdown=self._shutdown
        )
        assert batch is not None, "no shutdown is requested"
        self.waited += actors.now - began
        self.trained_at |= {group.ticket.group_id: self.version for group in batch.groups}
        actors.play_until(actors.now + self._cell.step_units)
        self.version += 1
        actors.publish(self.version)
        self._buffer.settle(self.version)

    def _wait(self, seconds: float) -> None:
        self._actors.play_on()
        self._sweep()

    def _sweep(self) -> None:
        if self._old_rule:
            self._old_rule.sweep(self.version)


class OldRule:
    """The former rule of a claim: drop ready groups whose oldest token lags by more than the cap."""

    def __init__(self, buffer: LearnerBuffer, actors: VirtualActors, *, max_lag: int) -> None:
        self._buffer, self._actors, self._max_lag = buffer, actors, max_lag
        self._oldest: dict[int, int] = {}  # version, of the finished groups that were not dropped
        self._num_seen = 0

    def sweep(self, version: int) -> None:
        for group_id, members in itertools.islice(self._actors.finished.items(), self._num_seen, None):
            self._oldest[group_id] = min(member.oldest_policy_version for member in members)
        self._num_seen = len(self._actors.finished)
        stale = [group_id for group_id, oldest in self._oldest.items() if version - oldest > self._max_lag]
        for group_id in stale:
            del self._oldest[group_id]
        self._buffer.drop(stale, "too_old")  # this does not change groups that have been trained


def result_of(
    cell: Cell,
    start: Start,
    learner: VirtualLearner,
    actors: VirtualActors,
    durations: Durations,
    *,
    opened: range,
    held: set[int],
) -> Result:
    """Count what was trained and what was dropped since the start; the groups `held` are neither yet."""
    num_tokens: Counter[tuple[bool, bool]] = Counter()  # by (of a long task, masked)
    groups: Counter[bool] = Counter()
    dropped: Counter[bool] = Counter()
    lags: Counter[str] = Counter()
    dropped_tokens = 0
    for group_id, members in actors.finished.items():
        is_long = durations.is_long(members[0].task.index)
        version = learner.trained_at.get(group_id)
        if version is not None and version >= start.version:
            groups[is_long] += 1
            for lag, count in token_lags(members, version):
                num_tokens[is_long, lag > cell.max_lag] += count
                lags[bucket_of(lag)] += count
        elif version is None and group_id not in held and ended(members) >= start.time:
            dropped[is_long] += 1
            dropped_tokens += sum(count for _, count in token_lags(members, 0))
    trained = num_tokens.total()
    masked = num_tokens[True, True] + num_tokens[False, True]
    long_tokens = num_tokens[True, True] + num_tokens[True, False]
    num_tasks = cell.config().env.num_train_tasks
    num_opened_long = sum(durations.is_long(task_index(group_id, num_tasks, cell.seed)) for group_id in opened)
    elapsed = actors.now - start.time
    return Result(
        rule=cell.rule,
        max_lag=cell.max_lag,
        target_lag=cell.target_lag,
        long=cell.long,
        step_units=cell.step_units,
        opened_long=_share(num_opened_long, len(opened)),
        trained_long=_share(groups[True], groups.total()),
        trained_long_tokens=_share(long_tokens, trained),
        taught_long_tokens=_share(num_tokens[True, False], trained - masked),
        dropped_long=_share(dropped[True], dropped[True] + groups[True]),
        masked=_share(masked, trained),
        masked_long=_share(num_tokens[True, True], long_tokens),
        wasted=_share(dropped_tokens + masked, dropped_tokens + trained),
        learner_idle=_share(learner.waited - start.waited, elapsed),
        steps_per_unit=round((learner.version - start.version) / elapsed, 4),
        lag={bucket: _share(lags[bucket], trained) for bucket in BUCKETS},
    )


def token_lags(members: Sequence[Trajectory], version: int) -> Iterator[tuple[int, int]]:
    """Yield the lag of tokens when they are trained at `version`, and their number."""
    for member in members:
        for span in member.version_spans:
            yield version - span.policy_version, span.stop - span.start


def ended(members: Sequence[Trajectory]) -> float:
    """When the last of the members ended."""
    return max(member.started_at_s + member.duration_s for member in members)


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def cells(options: argparse.Namespace) -> list[Cell]:
    """The runs: both rules with a quick learner, then the new rule with a slow learner."""
    rules = [(OLD_RULE, 4), *((NEW_RULE, max_lag) for max_lag in MAX_LAGS)]
    wanted = [
        (rule, max_lag, target_lag, long, QUICK)
        for target_lag in (2, 1, 4)
        for long in options.longs
        for rule, max_lag in rules
    ]
    wanted += [
        (NEW_RULE, 16, target_lag, long, PATIENT) for target_lag in (1, 2, 4, 8) for long in (1.0, *options.longs)
    ]
    return [
        Cell(
            rule=rule,
            max_lag=max_lag,
            target_lag=target_lag,
            long=long,
            step_units=step_units,
            num_steps=options.steps,
            seed=options.seed,
        )
        for rule, max_lag, target_lag, long, step_units in wanted
    ]


def main(arguments: Sequence[str]) -> None:
    """Run every cell and write the page."""
    parser = argparse.ArgumentParser(prog="study_durations", description=__doc__)
    parser.add_argument("--longs", nargs="+", type=float, default=[4.0, 8.0, 30.0], help="durations of long tasks")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps that are measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", type=Path, default=Path("docs/studies"), help="where the page is written")
    options = parser.parse_args(arguments)
    results = []
    wanted = cells(options)
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server(Path(folder)) as server,
        connect(server.admin_url) as client,
    ):
        client.config_set("appendonly", "no")  # no data needs to survive
        for number, cell in enumerate(wanted, start=1):
            results.append(measure(cell, client))
            print(f"{number} of {len(wanted)}: {cell}", flush=True)
    study = Study(
        command=" ".join(["python -m slipstream.tools.lab.fleets.durations", *arguments]), date=today(), results=results
    )
    write(study, options.docs)


if __name__ == "__main__":
    main(sys.argv[1:])
