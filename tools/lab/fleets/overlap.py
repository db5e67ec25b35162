"""`make study-overlap`: how long a step takes asynchronously and synchronously, where generation needs no core.

Learner, Redis and actor processes are real. The engines are scripted: they wait instead of computing, as an actor's
process waits for its GPU. So training and generation each have what they need, as on machines of their own.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir, write_whole
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.fleets.simulator import FleetPlan, play
from slipstream.tools.lab.study.page import markdown, with_table

ACTORS = (2, 4, 8)
MODES = {"asynchronous": (), "synchronous": ("replay.target_lag=0", "replay.max_lag=0")}
WARM_UP_STEPS = 10


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """The mean step of a fleet in one mode."""

    step_s: float
    wait_s: float  # of it, the learner waits for episodes

    @classmethod
    def of(cls, run_dir: RunDir) -> "Mode":
        records = read_metrics(run_dir.metrics)[WARM_UP_STEPS:]
        return cls(
            step_s=statistics.fmean(record["perf/step_s"] for record in records),
            wait_s=statistics.fmean(record["time/wait_s"] for record in records),
        )


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet in both modes."""

    num_actors: int
    modes: dict[str, Mode]

    @property
    def ratio(self) -> float:
        """Seconds of an asynchronous step for one second of a synchronous step."""
        return self.modes["asynchronous"].step_s / self.modes["synchronous"].step_s


def row_of(num_actors: int, folder: Path, *, num_steps: int) -> Row:
    """Play the fleet in both modes, one after the other."""
    modes = {}
    for mode, settings in MODES.items():
        plan = FleetPlan(name=f"{mode}-{num_actors}", num_actors=num_actors, settings=settings)
        config, _ = play(plan, folder, num_steps=num_steps)
        modes[mode] = Mode.of(RunDir(config.run.root, config.run.name))
    return Row(num_actors=num_actors, modes=modes)


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    head = ["actors"]
    for mode in MODES:
        head += [f"{mode}: a step", "the learner waits"]
    cells = [
        [
            str(row.num_actors),
            *(cell for mode in MODES for cell in _cells(row.modes[mode])),
            f"{row.ratio:.2f}",
        ]
        for row in rows
    ]
    return markdown([*head, "asynchronous ÷ synchronous"], cells)


def _cells(mode: Mode) -> list[str]:
    return [f"{mode.step_s:.2f} s", f"{mode.wait_s:.2f} s"]


def main(arguments: Sequence[str]) -> None:
    """Play all fleets in both modes, and write the page."""
    parser = argparse.ArgumentParser(prog="study_overlap", description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each run")
    parser.add_argument("--actors", type=int, nargs="+", default=list(ACTORS), help="actors of each fleet")
    parser.add_argument("--folder", type=Path, default=Path("build/study_overlap"), help="where runs are written")
    parser.add_argument("--docs", type=Path, default=Path("docs/studies"), help="where the page is written")
    options = parser.parse_args(arguments)
    folder, rows = options.folder / time.strftime("%Y%m%d-%H%M%S"), list[Row]()
    for num_actors in options.actors:
        rows.append(row_of(num_actors, folder, num_steps=options.steps))
        print(table(rows[-1:]), flush=True)
    command = " ".join(["python -m slipstream.tools.lab.fleets.overlap", *arguments])
    raw = {"command": command, "date": today(), "rows": msgspec.to_builtins(rows)}
    write_whole(options.docs / "overlap.json", msgspec.json.format(msgspec.json.encode(raw), indent=1).decode() + "\n")
    page = options.docs / "overlap.md"
    write_whole(page, with_table(page.read_text(), f"{table(rows)}\n`{command}`, {today()}.\n"))


if __name__ == "__main__":
    main(sys.argv[1:])
