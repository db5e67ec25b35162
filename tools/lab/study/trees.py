"""`make study-trees`: attempts that fork from each other, beside attempts that do not, at equal sampled tokens.

A cell is one run of a task, an arm and a seed, on its policy (lag 0). All cells of a task sample as many tokens.
Tokens that attempts share count once; those of dropped groups count too. The runs of a task and a seed begin with the
same warm start and visit the same tasks. Every result is a file; a cell with a result is not run again.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.run_dir import write_whole
from slipstream.envhub.catalogue import num_held_out
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.study.cells import ranks, run_cells
from slipstream.tools.lab.study.episodes import NothingToLearn, held_out
from slipstream.tools.lab.study.page import markdown, with_table
from slipstream.tools.lab.study.run import Practice, practice, warm_start
from slipstream.tools.lab.study.task import TASK

SHARED = (
    "replay.target_lag=0",
    "replay.max_lag=0",
    "learner.steps=100000",
    "eval.every=0",
    "eval.num_tasks=200",
)
# The settings of each task, and the tokens that a run samples.
TASKS: dict[str, tuple[int, tuple[str, ...]]] = {
    "shop": (250_000, ("warm_start.episodes=1500",)),
    "maze": (
        250_000,
        (
            "env.name=grid",
            "env.options.game=maze",
            "env.options.profile=small",
            "env.options.size=5",
            "env.max_turns=10",
            "model.max_tokens=288",
            "warm_start.episodes=1500",
        ),
    ),
    "household": (
        250_000,
        (
            "env.name=household",
            "env.options={profile: small, task_types: [pick_and_place]}",
            "env.max_turns=10",
            "model.max_tokens=768",
            "warm_start.episodes=3000",
        ),
    ),
}
TREE = "objective.advantage=tree"
ARMS: dict[str, tuple[str, ...]] = {
    "chains": ("objective.advantage=leave_one_out",),
    "2 trees": (TREE, "replay.num_trees=2"),
    "4 trees": (TREE, "replay.num_trees=4"),
}
MARKS = (0.25, 0.5, 0.75, 1.0)  # parts of a run's tokens after which the weights are evaluated
SEEDS = (0, 1, 2)


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An evaluation."""

    tokens: int  # sampled until then
    steps: int
    success: float  # of sampled episodes on held-out tasks


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run."""

    task: str
    arm: str
    seed: int
    points: list[Point]  # the first one is of the warm start
    attempts: int  # that were played
    forks: int  # of them, those that began with the turns of another
    dropped: float  # share of groups in which nothing had an advantage


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run, and the place of its files."""

    task: str
    arm: str
    seed: int
    folder: Path
    tokens: int  # 0: those of TASKS
    settings: tuple[str, ...]  # `a.b=c` that all cells share

    @property
    def name(self) -> str:
        return f"{self.task}-{self.arm.replace(' ', '-')}-seed{self.seed}"

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def budget(self) -> int:
        return self.tokens or TASKS[self.task][0]

    @property
    def warm_name(self) -> str:
        return f"warm-{self.task}-seed{self.seed}"

    def config(self) -> Config:
        """Return what the run trains with."""
        return self._loaded(self.name, *ARMS[self.arm], f"model.path={self.folder / self.warm_name / 'trained_model'}")

    def warm_config(self) -> Config:
        """Return the configuration of the run that makes the initial model of all cells of this task and seed."""
        return self._loaded(self.warm_name, *ARMS["chains"])

    def _loaded(self, name: str, *settings: str) -> Config:
        own = (f"run.name={name}", f"run.root={self.folder}", f"run.seed={self.seed}")
        return load_config(TASK, [*SHARED, *TASKS[self.task][1], *self.settings, *settings, *own])


def main(arguments: Sequence[str]) -> None:
    """Run the cells that have no result, and write the page from all results."""
    options = _parsed(arguments)
    cells = [
        Cell(
            task=task,
            arm=arm,
            seed=seed,
            folder=options.folder,
            tokens=options.tokens,
            settings=tuple(options.settings),
        )
        for seed in options.seeds
        for task in options.tasks
        for arm in options.arms
    ]
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.page_only:
        missing = [cell for cell in cells if not cell.result.exists()]
        run_cells(missing, warm=_warm, warm_name=lambda cell: cell.warm_name, run=_run, workers=options.workers)
    results = [msgspec.json.decode(cell.result.read_bytes(), type=Result) for cell in cells if cell.result.exists()]
    found = f"{table(results)}\n`python -m slipstream.tools.lab.study.trees`, {today()}.\n"
    if options.page:
        write_whole(options.page, with_table(options.page.read_text(), found))
    print(found)


def table(results: Sequence[Result]) -> str:
    """In Markdown, the success of each task and arm as it samples: means over seeds, with each seed in brackets."""
    rows = []
    for task, arm in {(result.task, result.arm): None for result in results}:
        own = [result for result in results if (result.task, result.arm) == (task, arm)]
        points = list(zip(*(result.points for result in own), strict=True))
        rows.append(
            [
                task,
                arm,
                *(_each([100 * point.success for point in of_mark], "{:.0f}") for of_mark in points),
                _each([100 * statistics.fmean(p.success for p in result.points[1:]) for result in own], "{:.1f}"),
                _each([result.points[-1].steps for result in own], "{:.0f}"),
                _each([100 * result.forks / result.attempts for result in own], "{:.0f}"),
                _each([100 * result.dropped for result in own], "{:.0f}"),
            ]
        )
    marks = [f"{mark:.0%}" for mark in MARKS]
    head = ["task", "attempts", "before", *marks, "mean of these", "steps", "forks, %", "groups dropped, %"]
    return markdown(head, rows)


def _each(values: Sequence[float], form: str) -> str:
    each = f" ({', '.join(map(form.format, values))})" if len(values) > 1 else ""
    return form.format(statistics.fmean(values)) + each


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="study_trees", description=__doc__)
    parser.add_argument("settings", nargs="*", help="a.b=c for every cell; overrides the task's")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--tokens", type=int, default=0, help="that each run samples; 0: as the task says")
    parser.add_argument("--workers", type=int, default=2, help="number of processes, each of one thread")
    parser.add_argument("--folder", type=Path, default=Path("build/study_trees"), help="where results are written")
    parser.add_argument("--page", type=Path, help="the page whose table is replaced")
    parser.add_argument("--page-only", action="store_true", help="run nothing; write the page from existing results")
    return parser.parse_intermixed_args(arguments)


def _warm(cell: Cell) -> None:
    warm_start(cell.warm_config(), ranks=ranks())


def _run(cell: Cell) -> str:
    result = run_cell(cell, ranks=ranks())
    write_whole(cell.result, msgspec.json.encode(result).decode())
    return f"{cell.name}: held-out success {', '.join(f'{point.success:.3f}' for point in result.points)}"


def run_cell(cell: Cell, *, ranks: Ranks) -> Result:
    """Train and evaluate, from the warm start."""
    with asyncio.Runner() as runner:
        return measured(practice(cell.config(), lag=0, ranks=ranks, runner=runner), cell)


def measured(practised: Practice, cell: Cell) -> Result:
    """Train until the tokens are used up, and evaluate at each mark; the last weights count where nothing teaches."""
    points = [Point(tokens=0, steps=0, success=_success(practised))]
    num_sampled = attempts = forks = num_groups = num_dropped = 0
    with contextlib.suppress(NothingToLearn):
        for mark in MARKS:
            while num_sampled < mark * cell.budget:
                step = practised.step()
                num_sampled += step.num_sampled
                trained = [each for group in step.batch.groups for each in group.trajectories]
                attempts += len(trained)
                forks += sum(each.fork is not None for each in trained)
                num_groups += len(step.batch.groups) + sum(step.batch.num_dropped.values())
                num_dropped += step.batch.num_dropped["zero_variance"]
            points.append(Point(tokens=num_sampled, steps=practised.learner.progress.step, success=_success(practised)))
    while len(points) <= len(MARKS):
        points.append(Point(tokens=num_sampled, steps=practised.learner.progress.step, success=_success(practised)))
    return Result(
        task=cell.task,
        arm=cell.arm,
        seed=cell.seed,
        points=points,
        attempts=max(attempts, 1),
        forks=forks,
        dropped=num_dropped / max(num_groups, 1),
    )


def _success(practised: Practice) -> float:
    learner = practised.learner
    practised.setup.sampler.load(practised.snapshots[-1], learner.progress.policy_version)
    episodes = held_out(practised.setup, num_tasks=num_held_out(learner.config))
    return statistics.fmean(episode.success for episode in episodes)


if __name__ == "__main__":
    main(sys.argv[1:])
