"""`make study-lag`: study the cost of lag, and the effect of each correction, on the task of the quickstart.

A cell is one run with an arm (a correction), an exact lag, and a seed. The runs of one seed begin with the same warm
start and visit the same tasks. Every result is a file; a cell with a result is not run again.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.output import write_whole
from slipstream.common.process.shutdown import die_with_parent
from slipstream.envhub.catalogue import num_held_out
from slipstream.learner.ranks.ranks import Ranks, join_ranks
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.study.lag_arms import ARMS, Arm
from slipstream.tools.lab.study.page import Result, Study, write
from slipstream.tools.lab.study.run import run, warm_start

TASK = str(Path(__file__).with_name("shop.yaml"))
STEPS, HELD_OUT_TASKS = 60, 300
DEFAULT = "objective.advantage=group_standardised"  # the quickstart's own advantage is another
PRESETS = {path.stem: str(path) for path in sorted(Path("conf/objective").glob("*.yaml"))}
GRID = ("default", "dppo_tv", "tv_linear", "vtrace")  # what a screen of all arms by one seed left
LAGS = (8, 16, 0, 32, 4, 2, 1)  # the most informative ones first, for a study that is stopped early
SEEDS = (0, 1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run, and the place of its files."""

    arm: str
    lag: int  # optimizer steps
    seed: int
    folder: Path
    task: str  # a config file
    settings: tuple[str, ...]  # `a.b=c` that all cells share

    @property
    def name(self) -> str:
        return f"{self.arm}-lag{self.lag}-seed{self.seed}"

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    def config(self) -> Config:
        """What `slipstream learner` would get at this lag. Raises ConfigError for settings that it refuses."""
        lag = (f"replay.target_lag={self.lag}", f"replay.max_lag={self.lag}")
        settings = (*lag, *self.way.settings, f"model.path={self.warm_model}")
        return self._loaded(self.name, *settings, presets=[PRESETS[self.arm]] if self.arm in PRESETS else [])

    def warm_config(self) -> Config:
        """The configuration of the run that makes the initial model of all cells of this seed."""
        return self._loaded(self.warm_name)

    @property
    def warm_model(self) -> Path:
        return self.folder / self.warm_name / "trained_model"

    @property
    def way(self) -> Arm:
        return ARMS.get(self.arm, Arm())

    @property
    def warm_name(self) -> str:
        return f"warm-seed{self.seed}"

    def _loaded(self, name: str, *settings: str, presets: Sequence[str] = ()) -> Config:
        shared = (f"learner.steps={STEPS}", f"eval.num_tasks={HELD_OUT_TASKS}", "eval.every=0", *self.settings)
        if not presets:
            shared = (DEFAULT, *shared)
        return load_config(
            self.task,
            [*shared, *settings, f"run.name={name}", f"run.root={self.folder}", f"run.seed={self.seed}"],
            presets=presets,
        )


def main(arguments: Sequence[str]) -> None:
    """Run the cells that have no result, seed after seed, and write the page from all results."""
    options = _parsed(arguments)
    cells = [
        Cell(arm=arm, lag=lag, seed=seed, folder=options.folder, task=options.task, settings=tuple(options.settings))
        for seed in options.seeds
        for lag in options.lags
        for arm in options.arms
    ]
    options.folder.mkdir(parents=True, exist_ok=True)
    _run_all([cell for cell in cells if not cell.result.exists()], workers=options.workers)
    results = [msgspec.json.decode(cell.result.read_bytes(), type=Result) for cell in cells]
    config = cells[0].config()
    study = Study(
        command=" ".join(["python -m slipstream.tools.lab.study.lag", *arguments]),
        date=today(),
        steps=config.learner.steps,
        held_out_tasks=num_held_out(config),
        arms={arm: list(ARMS[arm].settings) if arm in ARMS else [] for arm in options.arms},
        results=results,
    )
    write(study, options.docs, name="lag")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="study_lag", description=__doc__)
    parser.add_argument("settings", nargs="*", help="a.b=c for every cell; overrides the task's")
    parser.add_argument("--task", default=TASK, help="the config file that every cell begins with")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *PRESETS], default=list(GRID))
    parser.add_argument("--lags", nargs="+", type=int, default=list(LAGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=2, help="number of processes, each of one thread")
    parser.add_argument("--folder", type=Path, default=Path("build/study_lag"), help="where results are written")
    parser.add_argument("--docs", type=Path, default=Path("docs/studies"), help="where the page is written")
    return parser.parse_intermixed_args(arguments)


_ranks: list[Ranks] = []  # of this worker process, which is the only rank of its group


def _run_all(cells: Sequence[Cell], *, workers: int) -> None:
    """Run the cells in worker processes of one thread each, after one warm start for each seed."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_join, initargs=(os.getpid(),)) as pool:
        list(pool.map(_warm, {cell.warm_name: cell for cell in cells}.values()))
        done = [pool.submit(_run, cell) for cell in cells]
        for number, future in enumerate(as_completed(done), start=1):
            print(f"{number} of {len(cells)}: {future.result()}", flush=True)


def _join(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    _ranks.append(join_ranks(timeout_s=60))


def _warm(cell: Cell) -> None:
    warm_start(cell.warm_config(), ranks=_ranks[0])


def _run(cell: Cell) -> str:
    made = run(cell.config(), lag=cell.lag, ranks=_ranks[0], change=cell.way.change)
    result = Result.of(made, arm=cell.arm, lag=cell.lag, seed=cell.seed)
    write_whole(cell.result, msgspec.json.encode(result).decode())
    return f"{cell.name}: held-out success {made.held_out:.3f}"


if __name__ == "__main__":
    main(sys.argv[1:])
