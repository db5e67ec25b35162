"""A day of simulated time with a fault every five minutes: does anything grow that should not?

python -m slipstream.tools.lab.sim.day --hours 24

It prints at every hour what the server holds, what the product's own code holds in this process, and how many files
the run has beside its archive. The archive grows by design, as do the checks' notes of what was trained.
"""

import argparse
import dataclasses
import gc
import logging
import random
import shutil
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

from slipstream.learner.supply import supply
from slipstream.tools.lab.sim import cast, disk
from slipstream.tools.lab.sim.cast import in_world
from slipstream.tools.lab.sim.schedule import FAULTS, RECOVERS_S, Fault, Play

SLOWER = 40  # than in a schedule of some seconds
BETWEEN_FAULTS_S = 300
ROOMS = ("learner", "replay", "common")
_REPLAY = dataclasses.replace(cast.CONFIG.replay, lease_ttl_s=cast.CONFIG.replay.lease_ttl_s * SLOWER)
SLOW = {
    "POLL_S": cast.POLL_S * SLOWER,
    "EPISODE_S": cast.EPISODE_S * SLOWER,
    "CONFIG": dataclasses.replace(
        cast.CONFIG, replay=_REPLAY, learner=dataclasses.replace(cast.CONFIG.learner, steps=10**6)
    ),
}


def main(arguments: list[str]) -> int:
    """Play the day. Return 1 if a promise broke."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.tools.lab.sim.day", description=__doc__)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    logging.getLogger("slipstream").setLevel(logging.CRITICAL + 1)
    for name, value in SLOW.items():
        setattr(cast, name, value)
    supply.POLL_S *= SLOWER
    root = Path(tempfile.mkdtemp(prefix="slipstream-day-"))
    game = Play(asked.seed, root, ())
    game.world.note = lambda *_: None  # type: ignore[method-assign]
    disk.use(game.disk)
    try:
        with in_world(game.world):
            return _play(game, asked.hours, random.Random(f"day {asked.seed}"))
    finally:
        disk.use(None)
        shutil.rmtree(root)


def _play(game: Play, hours: int, chance: random.Random) -> int:
    game.start_learner()
    game.actors = [game.cast.actor(f"actor-{number}") for number in range(2)]
    game.world.at(0.1, game._tend)
    tracemalloc.start()
    print("| hour | steps | faults | server: keys | KiB | product: KiB | files |\n|---|---|---|---|---|---|---|")
    num_faults = 0
    for hour in range(1, hours + 1):
        for _ in range(3600 // BETWEEN_FAULTS_S):
            game.world.run(BETWEEN_FAULTS_S - RECOVERS_S * 3)
            fault = Fault(kind=chance.choice(list(FAULTS)), at_s=0.0, value=chance.random())
            game._strike(fault)
            num_faults += 1
            game.world.run(RECOVERS_S)
            game._heal()
            game.world.run(RECOVERS_S * 2)
        print(f"| {hour} | {game._durable_step()} | {num_faults} | {_held(game)} |", flush=True)
    game._end()
    print(*game.cast.seen.violations, sep="\n")
    return 1 if game.cast.seen.violations else 0


def _held(game: Play) -> str:
    game.cast.seen.fences.clear()  # numbers of the product's, which the checks keep
    game.learners = [learner for learner in game.learners if learner.is_running]
    names = game.world.store.execute(game.world.now_us + game.world.skew_us, "SCAN", 0)[1]
    num_bytes = sum(_size(each) for each in game.world.store.save().values())
    gc.collect()
    ours = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(True, f"*/{room}/*") for room in ROOMS] + [tracemalloc.Filter(False, "*/lab/*")]
    )
    size = sum(each.size for each in ours.statistics("filename"))
    folder = game.cast.run_dir.path
    num_files = sum(path.is_file() and "trajectories" not in path.parts for path in folder.rglob("*"))
    return f"{len(names)} | {num_bytes // 1024} | {size // 1024} | {num_files}"


def _size(stored: Any) -> int:
    """The bytes of a stored value, of a Lua table with all that it holds."""
    if isinstance(stored, bytes):
        return len(stored)
    if isinstance(stored, int | float):
        return 8
    return sum(_size(name) + _size(each) for name, each in stored.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
