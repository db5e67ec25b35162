"""`make study-prm`: a search guided by a process reward model, beside choosing among whole episodes at equal tokens.

A cell is a seed: a warm-started policy plays the small shop, its turns are labelled by completions, and two models of
equal size learn from the same episodes, in equally many passes: one of the process (labels at every turn), one of
outcome (the label of the last turn alone). Then held-out tasks are played, and each way to choose is measured at the
tokens that it samples. Every result is a file; a seed with a result is not run again.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.actors.group.group import EpisodeSetup
from slipstream.actors.search.episode_tree import Collected, EpisodeTree
from slipstream.common.config.config import Config, load_config
from slipstream.common.process.run_dir import write_whole
from slipstream.common.records.trajectory import Task, Trajectory
from slipstream.common.text.transcript import Transcriber
from slipstream.learner.credit.score import RewardScorer, load_scorer
from slipstream.learner.model.packed_model import ModelSettings
from slipstream.learner.objective.turn_labels import AGGREGATES, aggregated
from slipstream.learner.ranks.ranks import Ranks, join_ranks
from slipstream.tools.data.row_files import write_rows
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.study.page import markdown, with_table
from slipstream.tools.lab.study.run import warm_start
from slipstream.tools.lab.study.task import TASK
from slipstream.tools.play.collect import STATE, attempt_at, play_task
from slipstream.tools.play.fixed_policy import start_fixed_policy
from slipstream.tools.play.state_values import StateValues, scored_here
from slipstream.tools.replay.export import row_of
from slipstream.tools.run.collect_options import CollectOptions

SEEDS = (0, 1, 2)
FIRST_TRAIN_TASK = 50_000  # the warm start's tasks come before
POOL = 8  # episodes of each held-out task
SIZES = (1, 2, 4, 8)
BEAMS = ((2, 1), (4, 1), (3, 2))  # width and beam of the search
GUIDED, UNGUIDED = "search by the process model", "search by the policy's likelihood"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is played in each seed."""

    train_tasks: int = 800
    train_episodes: int = 1  # of each train task; every turn of theirs is labelled
    completions: int = 2
    epochs: int = 3  # of the process model; the model of outcome has as many passes over other episodes
    held_out_tasks: int = 100


class Way(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to choose an episode of each task, at one size."""

    name: str
    size: str
    tokens: float  # sampled for each task
    success: list[float]  # of each held-out task


class Seed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of one seed."""

    seed: int
    calibration: dict[str, float]  # of the process model on held-out rows
    ways: list[Way]

    def of(self, name: str) -> list[Way]:
        return [way for way in self.ways if way.name == name]


def main(arguments: Sequence[str]) -> None:
    """Run the seeds that have no result, and write the page from all results."""
    options = _parsed(arguments)
    plan = Plan(**{name: value for name, value in vars(options).items() if name in Plan.__slots__ and value})
    results, ranks = [], join_ranks(timeout_s=600)
    for seed in options.seeds:
        file = options.folder / f"seed{seed}.json"
        if not file.exists():
            options.folder.mkdir(parents=True, exist_ok=True)
            found = run_seed(seed, plan, options.settings, options.folder, ranks=ranks)
            write_whole(file, msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
        results.append(msgspec.json.decode(file.read_bytes(), type=Seed))
    if options.page:
        cells = {"command": "python -m slipstream.tools.lab.study.prm", "date": today(), "seeds": results}
        write_whole(options.page.with_suffix(".json"), msgspec.json.encode(cells).decode() + "\n")
        table = f"{tables(results)}\n[All cells](prm.json). `python -m slipstream.tools.lab.study.prm`, {today()}.\n"
        write_whole(options.page, with_table(options.page.read_text(), table))
    print(tables(results))


def run_seed(seed: int, plan: Plan, settings: Sequence[str], folder: Path, *, ranks: Ranks) -> Seed:
    """Train policy and reward models, and measure every way to choose."""
    shared = [*settings, f"run.root={folder}", f"run.seed={seed}"]
    model = warm_start(load_config(TASK, [*shared, f"run.name=policy{seed}"]), ranks=ranks)
    config = load_config(TASK, [*shared, f"run.name=play{seed}", f"model.path={model}"])
    config.replay.group_size = plan.train_episodes
    with asyncio.Runner() as runner:
        stage = start_fixed_policy(config, name="study")
        try:
            trained = folder / f"rows{seed}"
            if not trained.with_suffix(".process.jsonl").exists():
                write_labels(runner.run(labelled_episodes(stage, config, plan)), stage, plan, trained)
            folders = {kind: _fitted(kind, trained, config, shared, plan) for kind in ("process", "outcome")}
            values = {kind: scored_here(_scorer(path, model, config, ranks)) for kind, path in folders.items()}
            ways = runner.run(measured(stage, config, plan, values))
        finally:
            runner.run(stage.engine.close())
    table = json.loads((folder / f"process{seed}" / "calibration.json").read_text())
    numbers = {name: value for name, value in table.items() if isinstance(value, int | float)}
    return Seed(seed=seed, calibration=numbers, ways=ways)


async def labelled_episodes(stage: EpisodeSetup, config: Config, plan: Plan) -> Collected:
    """Play train tasks, and label every turn."""
    options = CollectOptions(completions=plan.completions)
    collected = Collected()
    first = FIRST_TRAIN_TASK
    await _each(
        [
            Task(env=label, split="train", index=first + place)
            for label in stage.envs
            for place in range(plan.train_tasks)
        ],
        lambda tree: play_task(tree, config, options),
        stage,
        config,
        collected=collected,
    )
    return collected


async def _each(
    tasks: Sequence[Task],
    play: Callable[[EpisodeTree], Awaitable[None]],
    stage: EpisodeSetup,
    config: Config,
    *,
    collected: Collected,
    values: StateValues | None = None,
) -> None:
    """Play every task in a tree of its own, `actors.max_episodes` at a time."""
    room, tasks_at_a_time = (asyncio.Semaphore(config.actors.max_episodes) for _ in range(2))

    async def one(task: Task) -> None:
        async with tasks_at_a_time:
            attempt = attempt_at(config, stage, task, group_id=task.index)
            valued = values.of_state if values else None
            await play(EpisodeTree(attempt, setup=stage, room=room, collected=collected, values=valued))

    await asyncio.gather(*map(one, tasks))


def write_labels(collected: Collected, stage: EpisodeSetup, plan: Plan, path: Path) -> None:
    """Write the rows of both models: labels of every turn; and labels of the last turn, of one episode for each pass.

    The episodes of the model of outcome are all that were played, roots and completions, in a random order.
    """
    transcriber = Transcriber(stage.tokenizer, rules=stage.allowance.rules)
    roots = [each for each in collected.trajectories if (each.group_id, each.member) in collected.labels]
    chosen = random.Random(0).sample(collected.trajectories, len(collected.trajectories))[: plan.epochs * len(roots)]
    for kind, trajectories in (("outcome", chosen), ("process", roots)):
        rows = []
        for trajectory in trajectories:
            row = row_of(trajectory, transcriber, state=STATE, step=None)
            known = collected.labels.get((trajectory.group_id, trajectory.member), [])
            whole = [None] * (len(trajectory.turns) - 1) + [float(trajectory.success)]
            rows.append(row | {"turn_labels": known if kind == "process" else whole})
        write_rows(path.with_suffix(f".{kind}.jsonl"), rows)


def _fitted(kind: str, rows: Path, config: Config, shared: Sequence[str], plan: Plan) -> Path:
    """The folder of a reward model, fitted in a process of its own."""
    name = f"{kind}{config.run.seed}"
    folder = Path(config.run.root) / name / "trained_model"
    if not folder.exists():
        data, epochs = rows.with_suffix(f".{kind}.jsonl"), plan.epochs if kind == "process" else 1
        command = [
            sys.executable,
            "-P",
            "-m",
            "slipstream.tools.cli.cli",
            "prm",
            TASK,
            *shared,
            f"run.name={name}",
            "--held-out=0.1",
        ]
        command += [f"model.path={config.model.path}", f"--data={data}", f"--epochs={epochs}", "--batch-rows=16"]
        subprocess.run([*command, "optim.lr=3e-3", "optim.schedule=linear"], check=True)
    return folder


def _scorer(folder: Path, policy: Path, config: Config, ranks: Ranks) -> RewardScorer:
    settings = dataclasses.replace(ModelSettings.of(config), dtype="float32").frozen()
    return load_scorer(
        folder, policy=policy, settings=settings, micro_batch_tokens=config.learner.micro_batch_tokens, ranks=ranks
    )


async def measured(stage: EpisodeSetup, config: Config, plan: Plan, values: Mapping[str, StateValues]) -> list[Way]:
    """Every way to choose, on held-out tasks."""
    (label,) = stage.envs
    tasks = [Task(env=label, split="held_out", index=index) for index in range(plan.held_out_tasks)]
    ways = await _chosen_of_pools(tasks, stage, config, values)
    for width, beam in BEAMS:
        for name, guide in ((GUIDED, values["process"]), (UNGUIDED, None)):
            ways.append(await _searched(name, tasks, stage, config, guide, judge=values, width=width, beam=beam))
    return ways


async def _chosen_of_pools(
    tasks: Sequence[Task], stage: EpisodeSetup, config: Config, values: Mapping[str, StateValues]
) -> list[Way]:
    """Best-of-n by each ranking. A pool has POOL / n disjoint groups of n episodes, and a task counts their mean."""
    pool = Collected()
    options = CollectOptions()
    sized = dataclasses.replace(config, replay=dataclasses.replace(config.replay, group_size=POOL))
    await _each(tasks, lambda tree: play_task(tree, sized, options), stage, config, collected=pool)
    by_task: dict[int, list[Trajectory]] = {task.index: [] for task in tasks}
    for trajectory in sorted(pool.trajectories, key=lambda each: each.member):  # not by which ended first
        by_task[trajectory.group_id].append(trajectory)
    ranked = await asyncio.gather(*(_rankings(group, values) for group in by_task.values()))
    scores = dict(zip(by_task, ranked, strict=True))
    ways = []
    for name in next(iter(scores.values())):
        for size in SIZES:
            success = [_best_of(by_task[task.index], scores[task.index][name], size) for task in tasks]
            tokens = pool.num_sampled / len(tasks) * size / POOL
            ways.append(Way(name=name, size=str(size), tokens=tokens, success=success))
    return ways


async def _rankings(group: Sequence[Trajectory], values: Mapping[str, StateValues]) -> dict[str, list[float]]:
    """Each way's number for each episode; the highest is chosen."""
    process = await asyncio.gather(*map(values["process"].of_turns, group))
    outcome = await asyncio.gather(*map(values["outcome"].of_state, group))
    ends = [trajectory.turns[-1].state_key for trajectory in group]
    sampled = [each.behaviour_logprob_array()[each.loss_mask_array()] for each in group]
    return {
        "one episode": [0.0] * len(group),
        "likelihood": [float(each.mean()) for each in sampled],
        "majority": [float(Counter(ends)[end]) for end in ends],
        "outcome model": list(outcome),
        **{f"process model, {how}": [aggregated(each, how) for each in process] for how in AGGREGATES},
        "best of all (needs the answer)": [float(trajectory.success) for trajectory in group],
    }


def _best_of(group: Sequence[Trajectory], ranks: Sequence[float], size: int) -> float:
    """The mean success of the episode that ranks first in each disjoint part of `size`; among equal ones, the first."""
    parts = [range(start, min(start + size, len(group))) for start in range(0, len(group), size)]
    return statistics.fmean(group[max(part, key=lambda place: ranks[place])].success for part in parts)


async def _searched(
    name: str,
    tasks: Sequence[Task],
    stage: EpisodeSetup,
    config: Config,
    guide: StateValues | None,
    *,
    judge: Mapping[str, StateValues],
    width: int,
    beam: int,
) -> Way:
    """Success of a search, by the best of the episodes that it ended: by the model that guides it, or by outcome."""
    found = Collected()
    options = CollectOptions(search="tree_of_thoughts", width=width, beam=beam)
    await _each(tasks, lambda tree: play_task(tree, config, options), stage, config, collected=found, values=guide)
    by_task: dict[int, list[Trajectory]] = {task.index: [] for task in tasks}
    for trajectory in sorted(found.trajectories, key=lambda each: each.member):
        by_task[trajectory.group_id].append(trajectory)
    chooser, success = guide or judge["outcome"], []
    for group in by_task.values():
        ranks = await asyncio.gather(*map(chooser.of_state, group))
        success.append(float(group[int(np.argmax(ranks))].success) if group else 0.0)
    return Way(name=name, size=f"{width} x {beam}", tokens=found.num_sampled / len(tasks), success=success)


def tables(results: Sequence[Seed]) -> str:
    """In Markdown: success of each way and size, and the search beside best-of-n at equal tokens."""
    first = results[0]
    chosen = [
        [name, *(_percent([way.success for way in _same(results, name, str(size))]) for size in SIZES)]
        for name in dict.fromkeys(way.name for way in first.ways if way.size in map(str, SIZES))
    ]
    tokens = [statistics.fmean(way.tokens for way in _same(results, "one episode", str(size))) for size in SIZES]
    head = [f"{size} ({number:.0f} tokens)" for size, number in zip(SIZES, tokens, strict=True)]
    searches = []
    for width, beam in BEAMS:
        size = f"{width} x {beam}"
        guided, plain = _same(results, GUIDED, size), _same(results, UNGUIDED, size)
        searches.append(
            [
                size,
                f"{statistics.fmean(way.tokens for way in guided):.0f}",
                _percent([way.success for way in guided]),
                *(_against(results, guided, name) for name in ("outcome model", "process model, last")),
                f"{statistics.fmean(way.tokens for way in plain):.0f}",
                _percent([way.success for way in plain]),
                _against(results, plain, "outcome model"),
            ]
        )
    columns = ["width x beam", "tokens", "guided", "minus outcome best-of-n", "minus process best-of-n"]
    columns += ["tokens, unguided", "unguided", "minus outcome best-of-n"]
    return f"{markdown(['best of n by', *head], chosen)}\n{markdown(columns, searches)}"


def _same(results: Sequence[Seed], name: str, size: str) -> list[Way]:
    return [way for seed in results for way in seed.of(name) if way.size == size]


def _percent(success: Sequence[Sequence[float]]) -> str:
    """The mean of the seeds in percent, with the lowest and the highest seed."""
    means = [100 * statistics.fmean(each) for each in success]
    return f"{statistics.fmean(means):.1f} ({min(means):.0f} to {max(means):.0f})"


def _against(results: Sequence[Seed], ways: Sequence[Way], name: str) -> str:
    """Success of `ways` minus best-of-n by `name` at as many tokens, in points: mean, 95 % interval over tasks, seeds.

    Best-of-n between two sizes is the line through them, for each task.
    """
    differences = []
    for seed, way in zip(results, ways, strict=True):
        differences.append(np.array(way.success) - at_tokens(seed.of(name), way.tokens))
    every = 100 * np.concatenate(differences)
    half = 1.96 * every.std(ddof=1) / math.sqrt(len(every))
    seeds = ", ".join(f"{100 * each.mean():+.0f}" for each in differences)
    return f"{every.mean():+.1f} ± {half:.1f} ({seeds})"


def at_tokens(ways: Sequence[Way], tokens: float) -> npt.NDArray[np.float64]:
    """The success of each task at `tokens` on the line through the sizes of one way; the ends count beyond them.

    Between 0 and 1 at 10 and 20 tokens, 15 tokens give 0.5.
    """
    places = [way.tokens for way in ways]
    return np.array([np.interp(tokens, places, each) for each in zip(*(way.success for way in ways), strict=True)])


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Study search guided by a process reward model.")
    parser.add_argument("--folder", type=Path, default=Path("build/study/prm"), help="where results are kept")
    parser.add_argument("--page", type=Path, help="the page whose table is written; default: printed only")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    for item in dataclasses.fields(Plan):
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=int, default=item.default)
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings of all seeds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
