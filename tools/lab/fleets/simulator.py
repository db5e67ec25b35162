"""`make study-simulator`: what `slipstream simulate` predicts for fleets that it has not seen, beside what they did.

Learner, Redis and actor processes are real; the engines are scripted, so that a machine of two cores can have many
actors. The simulator is calibrated on the records of the first fleet alone.
"""

import argparse
import math
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.connection import PASSWORD_VARIABLE
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir, write_whole
from slipstream.replay.server.server import start_private_server
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.study.page import markdown, with_table
from slipstream.tools.lab.study.task import TASK
from slipstream.tools.run.child import Child
from slipstream.tools.simulate.calibration import WARM_UP_STEPS, Calibration, calibrate
from slipstream.tools.simulate.simulate import plan_of
from slipstream.tools.simulate.simulate_options import SimulateOptions
from slipstream.tools.simulate.world import World

PRESET = "conf/objective/grpo.yaml"  # which drops groups of equal returns
SHARED = (
    "warm_start.episodes=0",
    "eval.num_tasks=0",
    "objective.guard_min_ess=0",
    "objective.guard_max_ratio=0",
    "replay.lease_ttl_s=4",
    "learner.checkpoint_every=1000",
    "actors.max_episodes=16",
    "actors.drain_s=0",
    "actors.price_per_hour=1",
    "env.rewards={goal: {weight: 0}, luck: {part: 'slipstream.tools.lab.fleets.scripted_actor:luck'}}",
)
RESTART_S = 3.0
POLL_S = 0.1
ACTOR = "slipstream.tools.lab.fleets.scripted_actor"
SERVES = b"serving version"  # in the log of an actor that has its weights


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """A fleet, and what differs in it from the first one."""

    name: str
    num_actors: int
    settings: tuple[str, ...] = ()
    kills_per_hour: float = 0.0  # of each actor that serves, kill -9


FLEETS = (
    FleetPlan(name="calibration", num_actors=4),
    FleetPlan(name="fewer actors", num_actors=2),
    FleetPlan(name="more actors, more lag", num_actors=8, settings=("replay.target_lag=4", "replay.max_lag=16")),
    FleetPlan(name="kills", num_actors=4, kills_per_hour=180.0),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet, measured and simulated: steps an hour, mean lag of the oldest tokens, the share of the groups that was
    dropped, and dollars for a hundred steps where an actor's hour costs one.
    """

    name: str
    num_actors: int
    settings: list[str]
    kills_per_hour: float
    num_killed: int
    restart_s: float  # from a kill until a replacement served, measured, and given to the simulator
    steps_per_hour: float
    simulated_steps_per_hour: float
    lag: float
    simulated_lag: float
    dropped: float
    simulated_dropped: float
    dollars: float
    simulated_dollars: float


def play(fleet: FleetPlan, folder: Path, *, num_steps: int) -> tuple[Config, list[float]]:
    """Run the fleet until its learner has finished; return its configuration, and for each kill the seconds until a
    replacement served.
    """
    name = fleet.name.replace(" ", "-").replace(",", "")
    own = (f"run.name={name}", f"run.root={folder}", f"learner.steps={num_steps}", f"actors.count={fleet.num_actors}")
    config = load_config(TASK, [*SHARED, *fleet.settings, *own], presets=[PRESET])
    run_dir = RunDir(folder, name)
    run_dir.create()
    with start_private_server(run_dir.redis) as server:
        config.redis.url = server.url
        write_whole(run_dir.config, dump_config(config))
        secrets = {"OMP_NUM_THREADS": "1", PASSWORD_VARIABLE: server.password}
        learner = _child("learner", ["slipstream.tools.cli.cli", "learner", str(run_dir.config)], run_dir, secrets)
        seats = [
            Seat(
                child=_child(f"actor-{number}", [ACTOR, f"actor-{number}-0", str(run_dir.config)], run_dir, secrets),
                rate=fleet.kills_per_hour / 3600,
            )
            for number in range(fleet.num_actors)
        ]
        try:
            return config, _watch(learner, seats, run_dir)
        finally:
            for child in (*(seat.child for seat in seats), learner):
                child.kill()


def _child(name: str, command: list[str], run_dir: RunDir, secrets: dict[str, str]) -> Child:
    child = Child(name, [sys.executable, "-P", "-m", *command], log=run_dir.log(name), environment=secrets)
    child.start()
    return child


@dataclass(kw_only=True, slots=True)
class Seat:
    """An actor's seat in the fleet: its process is killed by chance, and started again RESTART_S later."""

    child: Child
    rate: float  # kills a second, while it serves
    dies_at: float = math.inf
    killed_at: float = 0.0
    num_lives: int = 1
    num_read: int = 0  # bytes of its log, before it was started again
    away_s: list[float] = field(default_factory=list)  # of each kill: until the replacement served a version

    def draw_life(self, chance: random.Random) -> None:
        self.dies_at = time.monotonic() + chance.expovariate(self.rate) if self.rate else math.inf

    def look(self, chance: random.Random) -> None:
        """Kill the process, start it, or notice that it serves, if it is time."""
        now = time.monotonic()
        if self.child.exit_code is not None:
            if now > self.killed_at + RESTART_S:
                self.num_read = self.child.log.stat().st_size
                *python, _, run = self.child.command
                self.child.command = [*python, f"{self.child.name}-{self.num_lives}", run]  # each life has its own cost
                self.num_lives += 1
                self.child.start()
        elif self.dies_at < now:
            self.child.send(signal.SIGKILL)
            self.child.wait(RESTART_S)
            self.killed_at, self.dies_at = now, math.inf
        elif self.killed_at and SERVES in self.child.log.read_bytes()[self.num_read :]:
            self.away_s.append(now - self.killed_at)
            self.killed_at = 0.0
            self.draw_life(chance)


def _watch(learner: Child, seats: Sequence[Seat], run_dir: RunDir) -> list[float]:
    """Kill actors from the first step on until the learner has ended; return how long each kill left a seat empty."""
    chance, training = random.Random(0), False
    while learner.exit_code is None:
        time.sleep(POLL_S)
        if not training and _is_training(run_dir):
            training = True
            for seat in seats:
                seat.draw_life(chance)
        for seat in seats if training else ():
            seat.look(chance)
    if learner.exit_code:
        raise RuntimeError(f"{learner.name} ended with {learner.exit_code}:\n{learner.last_log_lines()}")
    return [away_s for seat in seats for away_s in seat.away_s]


def _is_training(run_dir: RunDir) -> bool:
    return run_dir.metrics.exists() and run_dir.metrics.stat().st_size > 0


def row_of(fleet: FleetPlan, config: Config, facts: Calibration, *, away_s: Sequence[float], num_steps: int) -> Row:
    """The fleet's own records beside a simulation by the first fleet's."""
    records = read_metrics(RunDir(config.run.root, config.run.name).metrics)[WARM_UP_STEPS:]
    restart_s = statistics.fmean(away_s) if away_s else RESTART_S
    options = SimulateOptions(kills_per_hour=fleet.kills_per_hour, restart_s=restart_s, steps=10 * num_steps)
    simulated = World(plan_of(config, options, facts, num_actors=fleet.num_actors), facts).run()
    trained = (len(records) - 1) * config.replay.groups_per_step

    def growth(name: str) -> float:
        return records[-1].get(name, 0.0) - records[0].get(name, 0.0)

    return Row(
        name=fleet.name,
        num_actors=fleet.num_actors,
        settings=list(fleet.settings),
        kills_per_hour=fleet.kills_per_hour,
        num_killed=len(away_s),
        restart_s=restart_s,
        steps_per_hour=3600 / statistics.fmean(record["perf/step_s"] for record in records),
        simulated_steps_per_hour=simulated.steps_per_hour,
        lag=statistics.fmean(record["lag/mean"] for record in records),
        simulated_lag=simulated.lag,
        dropped=1 - trained / (trained + growth("replay/total_dropped_zero_variance")),
        simulated_dropped=simulated.dropped_share,
        dollars=100 * growth("fleet/cost_dollars") / (len(records) - 1),
        simulated_dollars=100 * simulated.dollars_per_hour / simulated.steps_per_hour,
    )


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    measures = ("steps an hour", "mean lag", "groups dropped", "$ for 100 steps")
    head = ["fleet", "actors", "killed", *(name for measure in measures for name in (measure, "simulated"))]
    cells = [
        [
            row.name,
            str(row.num_actors),
            str(row.num_killed),
            *_beside(row.steps_per_hour, row.simulated_steps_per_hour, ".0f"),
            *_beside(row.lag, row.simulated_lag, ".2f"),
            *_beside(row.dropped, row.simulated_dropped, ".1%"),
            *_beside(row.dollars, row.simulated_dollars, ".3f"),
        ]
        for row in rows
    ]
    return markdown(head, cells)


def _beside(measured: float, simulated: float, form: str) -> tuple[str, str]:
    """Two cells: the measured number, and the simulated one with its difference."""
    return f"{measured:{form}}", f"{simulated:{form}} ({simulated / measured - 1:+.1%})"


def main(arguments: Sequence[str]) -> None:
    """Run the fleets one after another, and write the page."""
    parser = argparse.ArgumentParser(prog="study_simulator", description=__doc__)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of each fleet, at most 99")
    parser.add_argument("--folder", type=Path, default=Path("build/study_simulator"), help="where runs are written")
    parser.add_argument("--docs", type=Path, default=Path("docs/studies"), help="where the page is written")
    options = parser.parse_args(arguments)
    folder = options.folder / time.strftime("%Y%m%d-%H%M%S")
    played = []
    for fleet in FLEETS:
        played.append(play(fleet, folder, num_steps=options.steps))
        print(f"{fleet.name}: {len(played[-1][1])} actors were killed", flush=True)
    facts = calibrate(played[0][0])
    rows = [
        row_of(fleet, config, facts, away_s=away_s, num_steps=options.steps)
        for fleet, (config, away_s) in zip(FLEETS, played, strict=True)
    ]
    command = " ".join(["python -m slipstream.tools.lab.fleets.simulator", *arguments])
    raw = {"command": command, "date": today(), "rows": msgspec.to_builtins(rows)}
    write_whole(
        options.docs / "simulator.json", msgspec.json.format(msgspec.json.encode(raw), indent=1).decode() + "\n"
    )
    print(table(rows))
    page = options.docs / "simulator.md"
    if page.exists():
        write_whole(page, with_table(page.read_text(), f"{table(rows)}\n`{command}`, {today()}.\n"))


if __name__ == "__main__":
    main(sys.argv[1:])
