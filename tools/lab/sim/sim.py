"""`make sim`: schedules of faults in virtual time, or the first seed that finds each planted bug.

python -m slipstream.tools.lab.sim.sim --schedules 100000 --processes 2
python -m slipstream.tools.lab.sim.sim --seed 17          # one schedule, with its trace in build/sim-17.txt
python -m slipstream.tools.lab.sim.sim --bugs             # the table of docs/promises.md
"""

import argparse
import gc
import logging
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.pool import Pool
from pathlib import Path

from slipstream.tools.lab.sim.bugs import BUGS, NO_BUG, Bug
from slipstream.tools.lab.sim.schedule import drawn, play, shrunk

MOST_SEEDS = 10_000  # for one planted bug


def found(bug: Bug, seeds: Sequence[int] = range(MOST_SEEDS)) -> tuple[int, str] | None:
    """The first seed whose schedule shows the bug, and what it shows."""
    for seed in seeds:
        if violations := play(seed, bug=bug).violations:
            return seed, violations[0]
    return None


def main(arguments: list[str]) -> int:
    """Play what was asked for. Return 0 if every schedule held, or if every bug was found."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.tools.lab.sim.sim", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first schedule")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, help="play only this schedule, and write its trace")
    parser.add_argument("--bugs", action="store_true", help="look for each planted bug")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        return _one(asked.seed)
    logging.getLogger("slipstream").setLevel(logging.CRITICAL + 1)
    gc.freeze()  # what is imported outlives every schedule
    with multiprocessing.get_context("fork").Pool(asked.processes) as pool:
        return _table(pool) if asked.bugs else _many(pool, range(asked.first, asked.first + asked.schedules))


def _one(seed: int) -> int:
    outcome, trace = play(seed), Path("build") / f"sim-{seed}.txt"
    trace.write_text("\n".join(outcome.trace) + "\n")
    print(*map(str, drawn(seed)), *outcome.violations, sep="\n")
    print(f"{outcome.num_verbs} verbs; the trace is in {trace}, its hash is {outcome.digest}")
    return 1 if outcome.violations else 0


def _table(pool: Pool) -> int:
    num_missed = 0
    for bug, seen in zip(BUGS, pool.imap(found, BUGS), strict=True):
        seed, what = seen or ("not found", "")
        num_missed += seen is None
        print(f"| {bug.name} | {bug.mended_by} | {seed} | {what[:80]} |", flush=True)
    return 1 if num_missed else 0


def _many(pool: Pool, seeds: range) -> int:
    started, num_verbs, failed = time.monotonic(), 0, list[int]()
    for number, (seed, verbs, violations) in enumerate(pool.imap_unordered(_played, seeds, chunksize=20), start=1):
        num_verbs += verbs
        if violations:
            failed.append(seed)
            print(f"schedule {seed} failed: {'; '.join(violations[:3])}", flush=True)
            print("  it needs only: " + ", ".join(map(str, shrunk(seed, bug=NO_BUG))), flush=True)
        if number % 500 == 0 or number == len(seeds):
            rate = number / (time.monotonic() - started)
            print(f"{number} schedules, {num_verbs} verbs, {rate:.1f} a second, {len(failed)} failed", flush=True)
    return 1 if failed else 0


def _played(seed: int) -> tuple[int, int, list[str]]:
    outcome = play(seed)
    return seed, outcome.num_verbs, outcome.violations


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
