"""Attempts that fork, at random or where a search says, beside attempts that do not, at equal sampled tokens.

A cell is one run of a task, an arm and a seed, on its policy (lag 0). Tokens that attempts share count once; those of
dropped groups count too. The runs of a task and a seed begin with the same warm start and visit the same tasks. Every
result is a file; a cell with a result is not run again.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.output import write_whole
from slipstream.learner.ranks.ranks import Ranks, join_ranks
from slipstream.tools.lab.study.episodes import NothingToLearn, held_out
from slipstream.tools.lab.study.page import markdown
from slipstream.tools.lab.study.run import Practice, practice, warm_start

BASE = Path(__file__).parent / "shop.yaml"
SHARED = ("replay.target_lag=0", "replay.max_lag=0", "learner.steps=100000", "eval.every=0", "warm_start.episodes=1500")
TASKS: dict[str, tuple[str, ...]] = {
    "shop": (),
    "maze": (
        "env.name=grid",
        "env.options={game: maze, profile: small, size: 5}",
        "env.max_turns=10",
        "model.max_tokens=288",
    ),
}
ARMS = {"chains": ""} | {trees: trees for trees in ("random:4", "mcts:2", "mcts:4", "dfsdt:4", "tree_of_thoughts:4")}
MARKS = (0.25, 0.5, 0.75, 1.0)  # parts of a run's tokens after which the weights are evaluated
NUM_TASKS = 200  # held out


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run."""

    task: str
    arm: str
    seed: int
    held_out: list[float]  # success of sampled episodes: of the warm start, and at each of MARKS
    tokens: int  # that were sampled
    steps: int
    forks: float  # share of the trained attempts
    dropped: float  # share of groups in which nothing had an advantage


def main(arguments: Sequence[str]) -> None:
    """Run the cells that have no result, and print the table of all results."""
    parser = argparse.ArgumentParser(prog="study_trees", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["chains", "random:4", "mcts:4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=250_000, help="that each run samples")
    parser.add_argument("--folder", type=Path, default=Path("build/study_trees"), help="where results are written")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    ranks = join_ranks(timeout_s=60)
    for seed in options.seeds:
        for task in options.tasks:
            for arm in options.arms:
                path = options.folder / f"{task}-{arm.replace(':', '-')}-seed{seed}.json"
                if not path.exists():
                    result = run_cell(task, arm, seed, folder=options.folder, tokens=options.tokens, ranks=ranks)
                    write_whole(path, msgspec.json.encode(result).decode())
                    print(result, flush=True)
    paths = sorted(options.folder.glob("*-seed*.json"))
    print(table([msgspec.json.decode(path.read_bytes(), type=Result) for path in paths]))


def run_cell(task: str, arm: str, seed: int, *, folder: Path, tokens: int, ranks: Ranks) -> Result:
    """Train and evaluate, from the warm start of the task and the seed."""
    warm = _config(task, "chains", seed, folder, f"run.name=warm-{task}-{seed}")
    path = warm_start(warm, ranks=ranks)
    name = f"run.name={task}-{arm.replace(':', '-')}-{seed}"
    with asyncio.Runner() as runner:
        config = _config(task, arm, seed, folder, name, f"model.path={path}")
        return _measured(practice(config, lag=0, ranks=ranks, runner=runner), task, arm, tokens=tokens)


def table(results: Sequence[Result]) -> str:
    """In Markdown: means over seeds, with each seed in brackets."""
    rows = []
    for task, arm in dict.fromkeys((result.task, result.arm) for result in results):
        own = [result for result in results if (result.task, result.arm) == (task, arm)]
        of_marks = zip(*(result.held_out for result in own), strict=True)
        rows.append(
            [
                task,
                arm,
                *(_each([100 * success for success in of_mark], "{:.0f}") for of_mark in of_marks),
                _each([100 * statistics.fmean(result.held_out[1:]) for result in own], "{:.1f}"),
                _each([result.steps for result in own], "{:.0f}"),
                _each([100 * result.forks for result in own], "{:.0f}"),
                _each([100 * result.dropped for result in own], "{:.0f}"),
            ]
        )
    marks = [f"{mark:.0%}" for mark in MARKS]
    return markdown(["task", "attempts", "before", *marks, "mean", "steps", "forks, %", "dropped, %"], rows)


def _each(values: Sequence[float], form: str) -> str:
    each = f" ({', '.join(map(form.format, values))})" if len(values) > 1 else ""
    return form.format(statistics.fmean(values)) + each


def _config(task: str, arm: str, seed: int, folder: Path, *own: str) -> Config:
    trees = ARMS[arm]
    kind = ("objective.advantage=tree", f"replay.trees={trees}") if trees else ("objective.advantage=leave_one_out",)
    return load_config(str(BASE), [*SHARED, *TASKS[task], *kind, f"run.root={folder}", f"run.seed={seed}", *own])


def _measured(practised: Practice, task: str, arm: str, *, tokens: int) -> Result:
    """Train until the tokens are used up, and evaluate at each mark; the last weights count where nothing teaches."""
    learner, successes = practised.learner, [_success(practised)]
    num_sampled = num_attempts = num_forks = num_groups = num_dropped = 0
    for mark in MARKS:
        with contextlib.suppress(NothingToLearn):
            while num_sampled < mark * tokens:
                step = practised.step()
                num_sampled += step.num_sampled
                trained = [each for group in step.batch.groups for each in group.trajectories]
                num_attempts += len(trained)
                num_forks += sum(each.fork is not None for each in trained)
                num_groups += len(step.batch.groups) + sum(step.batch.num_dropped.values())
                num_dropped += step.batch.num_dropped["zero_variance"]
        successes.append(_success(practised))
    return Result(
        task=task,
        arm=arm,
        seed=learner.config.run.seed,
        held_out=successes,
        tokens=num_sampled,
        steps=learner.progress.step,
        forks=num_forks / max(num_attempts, 1),
        dropped=num_dropped / max(num_groups, 1),
    )


def _success(practised: Practice) -> float:
    practised.setup.sampler.load(practised.snapshots[-1], practised.learner.progress.policy_version)
    return held_out(practised.setup, num_tasks=NUM_TASKS)


if __name__ == "__main__":
    main(sys.argv[1:])
