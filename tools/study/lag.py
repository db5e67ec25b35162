"""`make study-lag`: what lag costs, and what each correction of it wins back, on the quickstart's task.

A cell is one run: an arm (what is done about lag), a lag that is held exactly, and a seed. The runs of one seed begin
with the same warm start and visit the same tasks. Every result is a file; what is there already is not run again.
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

from common.config import Config, load_config
from common.run_dir import write_whole
from common.shutdown import die_with_parent
from learner.ranks import Ranks, join_ranks
from tools.bench.benchmark import today
from tools.study.page import Result, Study, write
from tools.study.run import run, warm_start

TASK = "conf/quickstart.yaml"
NOTHING_ELSE = ("objective.max_negative_kl=0", "objective.guard_min_ess=0", "objective.guard_max_ratio=0")
# What each arm changes of the default objective; advantage, surrogate and normalisation are the same in all.
ARMS: dict[str, tuple[str, ...]] = {
    "default": (),
    "uncorrected": ("objective.correction=none", *NOTHING_ELSE),
    "truncated_is": ("objective.correction=truncated_is", "objective.max_behaviour_weight=2", *NOTHING_ELSE),
    "decoupled": ("objective.correction=decoupled", "objective.max_behaviour_weight=5", *NOTHING_ELSE),
}
LAGS = (0, 4, 16, 8, 2, 1)  # in the order that tells the most before all is done
SEEDS = (0, 1, 2)
STEPS, HELD_OUT_TASKS = 60, 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run, and where its files go."""

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
        """What `slipstream learner` would be given, and refuse, at this lag. Raises ConfigError."""
        lag = (f"replay.target_lag={self.lag}", f"replay.max_lag={self.lag}")
        return self._loaded(self.name, *lag, *ARMS[self.arm], f"model.path={self.warm_model}")

    def warm_config(self) -> Config:
        """Of the run that makes and teaches the model which every cell of this seed begins with."""
        return self._loaded(self._warm_name)

    @property
    def warm_model(self) -> Path:
        return self.folder / self._warm_name / "trained_model"

    @property
    def _warm_name(self) -> str:
        return f"warm-seed{self.seed}"

    def _loaded(self, name: str, *settings: str) -> Config:
        shared = (f"learner.steps={STEPS}", f"eval.num_tasks={HELD_OUT_TASKS}", *self.settings)
        return load_config(
            self.task, [*shared, *settings, f"run.name={name}", f"run.root={self.folder}", f"run.seed={self.seed}"]
        )


def main(arguments: Sequence[str]) -> None:
    """Run what has no result yet, seed after seed, and write the page from what there is."""
    asked = _parsed(arguments)
    cells = [
        Cell(arm=arm, lag=lag, seed=seed, folder=asked.folder, task=asked.task, settings=tuple(asked.settings))
        for seed in asked.seeds
        for lag in asked.lags
        for arm in asked.arms
    ]
    asked.folder.mkdir(parents=True, exist_ok=True)
    if not asked.page_only:
        _run_all([cell for cell in cells if not cell.result.exists()], num_workers=asked.workers)
    results = [msgspec.json.decode(cell.result.read_bytes(), type=Result) for cell in cells if cell.result.exists()]
    config = cells[0].config()
    study = Study(
        command=" ".join(["python -m tools.study_lag", *(word for word in arguments if word != "--page-only")]),
        date=today(),
        steps=config.learner.steps,
        held_out_tasks=config.eval.num_tasks,
        arms={arm: list(ARMS[arm]) for arm in asked.arms},
        results=results,
    )
    write(study, asked.docs, name="lag")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="study_lag", description=__doc__)
    parser.add_argument("settings", nargs="*", help="a.b=c for every cell, over those of the task")
    parser.add_argument("--task", default=TASK, help="the config file that every cell begins with")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--lags", nargs="+", type=int, default=list(LAGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=2, help="processes, each of one thread")
    parser.add_argument("--folder", type=Path, default=Path("build/study_lag"), help="of the results")
    parser.add_argument("--docs", type=Path, default=Path("docs/studies"), help="where the page is written")
    parser.add_argument("--page-only", action="store_true", help="run nothing; write the page from what is there")
    return parser.parse_intermixed_args(arguments)


def _run_all(cells: Sequence[Cell], *, num_workers: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=spawn, initializer=_join, initargs=(os.getpid(),)) as pool:
        warm = {cell.seed: cell for cell in cells}
        list(pool.map(_warm, warm.values()))
        done = [pool.submit(_run, cell) for cell in cells]
        for number, future in enumerate(as_completed(done), start=1):
            print(f"{number} of {len(cells)}: {future.result()}", flush=True)


_ranks: list[Ranks] = []  # this worker's own, as it is the only one of its group


def _join(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    _ranks.append(join_ranks(timeout_s=60))


def _warm(cell: Cell) -> None:
    warm_start(cell.warm_config(), ranks=_ranks[0])


def _run(cell: Cell) -> str:
    made = run(cell.config(), lag=cell.lag, ranks=_ranks[0])
    result = Result.of(made, arm=cell.arm, lag=cell.lag, seed=cell.seed)
    write_whole(cell.result, msgspec.json.encode(result).decode())
    return f"{cell.name}: held-out success {made.held_out:.3f}"


if __name__ == "__main__":
    main(sys.argv[1:])
