"""`make study-formats`: train the task of the quickstart in each format of actions, and compare what comes of it.

A cell is one run with a format and a seed, on its policy (lag 0). The runs of one seed visit the same tasks; the warm
start is in the format. Every result is a file; a cell with a result is not run again.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.run_dir import write_whole
from slipstream.common.records.trajectory import Trajectory
from slipstream.envhub.catalogue import num_held_out
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.study.cells import ranks, run_cells
from slipstream.tools.lab.study.page import BEGIN, END, markdown, with_table
from slipstream.tools.lab.study.run import held_out_before, run, warm_start
from slipstream.tools.lab.study.task import TASK

STEPS, HELD_OUT_TASKS = 30, 200
SHARED = (
    "objective.advantage=group_standardised",
    "replay.target_lag=0",
    "replay.max_lag=0",
    "model.max_tokens=768",
    "sampling.max_turn_tokens=64",
)
# The format of each arm, and the settings beside it.
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("plain", ()),
    "action_tag": ("action_tag", ()),
    "react": ("react", ()),
    "outcome": ("outcome", ()),
    "outcome, scored": ("outcome", ("env.rewards.prediction.weight=0.1",)),
}
SEEDS = (0, 1, 2)


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of the study; rates and means are over held-out episodes, sampled."""

    arm: str
    seed: int
    steps: int  # optimizer steps that were made
    success_before: float  # of the weights after the warm start
    success: float  # of the last weights
    valid_actions: float  # share of their turns
    tokens_written: float  # sampled tokens of an episode
    turns: float


class Study(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The command of the study, and its results."""

    command: str
    date: str
    steps: int
    held_out_tasks: int
    results: list[Result]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run, and the place of its files."""

    arm: str
    seed: int
    folder: Path
    task: str  # a config file
    settings: tuple[str, ...]  # `a.b=c` that all cells share

    @property
    def name(self) -> str:
        return f"{self.arm.replace(', ', '-')}-seed{self.seed}"

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def warm_name(self) -> str:
        return f"warm-{ARMS[self.arm][0]}-seed{self.seed}"

    def config(self) -> Config:
        """Return what the run trains with."""
        warm_model = self.folder / self.warm_name / "trained_model"
        return self._loaded(self.name, *ARMS[self.arm][1], f"model.path={warm_model}")

    def warm_config(self) -> Config:
        """Return the configuration of the run that makes the initial model of all cells of this format and seed."""
        return self._loaded(self.warm_name)

    def _loaded(self, name: str, *settings: str) -> Config:
        return load_config(
            self.task,
            [
                *SHARED,
                f"learner.steps={STEPS}",
                f"eval.num_tasks={HELD_OUT_TASKS}",
                "eval.every=0",
                f"env.action_format={ARMS[self.arm][0]}",
                *self.settings,
                *settings,
                f"run.name={name}",
                f"run.root={self.folder}",
                f"run.seed={self.seed}",
            ],
        )


def main(arguments: Sequence[str]) -> None:
    """Run the cells that have no result, seed after seed, and write the page from all results."""
    options = _parsed(arguments)
    cells = [
        Cell(arm=arm, seed=seed, folder=options.folder, task=options.task, settings=tuple(options.settings))
        for seed in options.seeds
        for arm in options.arms
    ]
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.page_only:
        missing = [cell for cell in cells if not cell.result.exists()]
        run_cells(missing, warm=_warm, warm_name=lambda cell: cell.warm_name, run=_run, workers=options.workers)
    config = cells[0].config()
    study = Study(
        command=" ".join(
            ["python -m slipstream.tools.lab.study.formats", *(word for word in arguments if word != "--page-only")]
        ),
        date=today(),
        steps=config.learner.steps,
        held_out_tasks=num_held_out(config),
        results=[msgspec.json.decode(cell.result.read_bytes(), type=Result) for cell in cells if cell.result.exists()],
    )
    write(study, options.docs)


def write(study: Study, folder: Path) -> None:
    """Write formats.json into `folder`, and the table into formats.md there, between its two marks."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "formats.json", msgspec.json.format(msgspec.json.encode(study), indent=1).decode() + "\n")
    page = folder / "formats.md"
    write_whole(page, with_table(page.read_text() if page.exists() else BEGIN + END + "\n", table(study)))


def table(study: Study) -> str:
    """Return the results in Markdown: mean ± standard deviation over seeds, and the number of seeds."""
    first = next(iter(ARMS))
    head = ["format", "seeds", "success before, %", "after, %", f"less that of {first}, by seed"]
    head += ["invalid actions, %", "tokens a turn", "turns"]
    base = {result.seed: result.success for result in study.results if result.arm == first}
    rows = []
    for arm in ARMS:
        results = [result for result in study.results if result.arm == arm]
        gains = [100 * (result.success - base[result.seed]) for result in results if result.seed in base]
        if results:
            rows.append(
                [
                    arm,
                    str(len(results)),
                    _spread([100 * result.success_before for result in results]),
                    _spread([100 * result.success for result in results]),
                    "" if arm == first else ", ".join(f"{gain:+.1f}" for gain in gains),
                    _spread([100 * (1 - result.valid_actions) for result in results]),
                    _spread([result.tokens_written / result.turns for result in results]),
                    _spread([result.turns for result in results]),
                ]
            )
    return (
        f"{study.steps} steps, {study.held_out_tasks} held-out tasks, sampled: mean ± standard deviation over seeds.\n"
        "\n"
        f"{markdown(head, rows)}\n`{study.command}`, {study.date}.\n"
    )


def _spread(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{deviation}"


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="study_formats", description=__doc__)
    parser.add_argument("settings", nargs="*", help="a.b=c for every cell; overrides the task's")
    parser.add_argument("--task", default=TASK, help="the config file that every cell begins with")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=2, help="number of processes, each of one thread")
    parser.add_argument("--folder", type=Path, default=Path("build/study_formats"), help="where results are written")
    parser.add_argument("--docs", type=Path, default=Path("docs/studies"), help="where the page is written")
    parser.add_argument("--page-only", action="store_true", help="run nothing; write the page from existing results")
    return parser.parse_intermixed_args(arguments)


def _warm(cell: Cell) -> None:
    warm_start(cell.warm_config(), ranks=ranks())


def _run(cell: Cell) -> str:
    before = held_out_before(cell.config(), ranks=ranks())
    made = run(cell.config(), lag=0, ranks=ranks())
    result = _result(cell, before, made.held_out_episodes, steps=len(made.steps))
    write_whole(cell.result, msgspec.json.encode(result).decode())
    return f"{cell.name}: held-out success {result.success_before:.3f} to {result.success:.3f}"


def _result(cell: Cell, before: Sequence[Trajectory], episodes: Sequence[Trajectory], *, steps: int) -> Result:
    turns = [turn for episode in episodes for turn in episode.turns]
    return Result(
        arm=cell.arm,
        seed=cell.seed,
        steps=steps,
        success_before=statistics.fmean(episode.success for episode in before),
        success=statistics.fmean(episode.success for episode in episodes),
        valid_actions=statistics.fmean(turn.valid_action for turn in turns),
        tokens_written=sum(turn.stop - turn.start for turn in turns) / len(episodes),
        turns=len(turns) / len(episodes),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
