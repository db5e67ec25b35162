"""`make study-search`: searches beside independent episodes of the same policy, at equal sampled tokens.

A cell is an environment, a seed and an arm: a warm-started policy plays held-out tasks by one search. Every result is a
file; a cell with a result is not run again. An arm that is stopped begins again, and the others are kept.

Two questions are answered. With a known outcome, as in collection: how many tasks have a success within so many tokens?
Without one: how often does the episode succeed that is chosen among those that ended?
"""

import argparse
import asyncio
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.actors.group.group import EpisodeSetup
from slipstream.actors.search.episode_tree import Collected, EpisodeTree
from slipstream.common.config.config import Config, load_config
from slipstream.common.process.run_dir import write_whole
from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import num_held_out
from slipstream.learner.ranks.ranks import join_ranks, leave_ranks
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.study.page import with_table
from slipstream.tools.lab.study.run import warm_start
from slipstream.tools.lab.study.search_page import CHAIN, UNITS, Cell, OnTask, tables
from slipstream.tools.lab.study.task import TASK
from slipstream.tools.play.collect import attempt_at, play_task
from slipstream.tools.play.eval_attempt import Played
from slipstream.tools.play.fixed_policy import start_fixed_policy
from slipstream.tools.run.collect_options import CollectOptions

SHARED = ("model.max_tokens=768", "eval.num_tasks=60")
ENVS = {
    "shop": ("env.name=shop", "env.options={profile: small}", "env.max_turns=8"),
    "grid": (
        "env.name=grid",
        "env.options={game: maze, profile: small, size: 5}",
        "env.max_turns=8",
        "warm_start.episodes=800",
    ),
    "household": (
        "env.name=household",
        "env.options={profile: small, task_types: [pick_and_place]}",
        "env.max_turns=10",
        "warm_start.episodes=3000",
    ),
}
SEEDS = (0, 1, 2)
POOL = 16  # independent episodes of each task
ARMS = {
    CHAIN: CollectOptions(),
    "tree of thoughts, 2 x 1": CollectOptions(search="tree_of_thoughts", width=2, beam=1),
    "tree of thoughts, 3 x 2": CollectOptions(search="tree_of_thoughts", width=3, beam=2),
    "dfsdt": CollectOptions(search="dfsdt"),
    "mcts": CollectOptions(search="mcts"),
    "revision": CollectOptions(search="graph_of_thoughts", width=1, beam=1),
}


def main(arguments: Sequence[str]) -> None:
    """Run the cells that have no result, and write the page from all results."""
    options = _parsed(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    policies = [(env, seed) for seed in options.seeds for env in options.envs]
    for env, seed in () if options.page_only else policies:
        missing = [arm for arm in options.arms if not _file(options.folder, env, seed, arm).exists()]
        if missing:
            run_policy(env, seed, missing, options.settings, options.folder)
    files = [_file(options.folder, env, seed, arm) for env, seed in policies for arm in options.arms]
    cells = [msgspec.json.decode(file.read_bytes(), type=Cell) for file in files if file.exists()]
    text = f"{tables({(cell.env, cell.seed, cell.arm): cell for cell in cells})}\n`make study-search`, {today()}.\n"
    if options.page:
        write_whole(options.page, with_table(options.page.read_text(), text))
    print(text)


def _file(folder: Path, env: str, seed: int, arm: str) -> Path:
    return folder / f"{env}-{seed}-{arm.replace(', ', '-').replace(' ', '_')}.json"


def run_policy(env: str, seed: int, arms: Sequence[str], settings: Sequence[str], folder: Path) -> None:
    """Write the results of `arms` with one policy, which is warm-started if it does not exist."""
    shared = [*SHARED, *ENVS[env], *settings, f"run.root={folder}", f"run.seed={seed}"]
    ranks = join_ranks(timeout_s=600)
    try:
        model = warm_start(load_config(TASK, [*shared, f"run.name=policy-{env}-{seed}"]), ranks=ranks)
    finally:
        leave_ranks()
    config = load_config(TASK, [*shared, f"run.name=play-{env}-{seed}", f"model.path={model}"])
    with asyncio.Runner() as runner:
        stage = start_fixed_policy(config, name="study")
        try:
            for arm in sorted(arms, key=lambda arm: arm != CHAIN):  # the chain first: the budget of the others is its
                budget = 0 if arm == CHAIN else _turns(_file(folder, env, seed, CHAIN))
                cell = Cell(env=env, seed=seed, arm=arm, tasks=runner.run(played(arm, stage, config, budget=budget)))
                write_whole(_file(folder, env, seed, arm), msgspec.json.encode(cell).decode() + "\n")
                print(f"{env}, seed {seed}, {arm}: {sum(task.tokens for task in cell.tasks)} tokens", flush=True)
        finally:
            runner.run(stage.engine.close())


def _turns(chain_file: Path) -> int:
    """The budget of a search: the turns of as many mean episodes of the chain as the largest of UNITS."""
    chain = msgspec.json.decode(chain_file.read_bytes(), type=Cell)
    return round(UNITS[-1] * statistics.fmean(each.num_turns for task in chain.tasks for each in task.episodes))


async def played(arm: str, stage: EpisodeSetup, config: Config, *, budget: int) -> list[OnTask]:
    """Play the held-out tasks by one arm, each in a tree of its own."""
    options = ARMS[arm] if arm == CHAIN else dataclasses.replace(ARMS[arm], budget=budget)
    config = dataclasses.replace(config, replay=dataclasses.replace(config.replay, group_size=POOL))
    room, tasks_at_a_time = (asyncio.Semaphore(config.actors.max_episodes) for _ in range(2))
    (label,) = stage.envs

    async def on(index: int) -> OnTask:
        async with tasks_at_a_time:
            attempt = attempt_at(config, stage, Task(env=label, split="held_out", index=index), group_id=index)
            collected = Collected()
            await play_task(EpisodeTree(attempt, setup=stage, room=room, collected=collected), config, options)
            return _on_task(collected, in_order=arm != CHAIN)

    return await asyncio.gather(*map(on, range(num_held_out(config))))


def _on_task(collected: Collected, *, in_order: bool) -> OnTask:
    """`in_order`: its episodes ended one after another. Independent ones ran side by side: in order of member."""
    ended = list(zip(collected.trajectories, collected.sampled_by, strict=True))
    if not in_order:
        ended.sort(key=lambda each: each[0].member)
    successes = [tokens for record, tokens in ended if record.success]
    return OnTask(
        tokens=collected.num_sampled,
        solved_by=successes[0] if successes and in_order else None,
        episodes=[Played.of(record, action=None) for record, _ in ended],
    )


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="study_search", description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings of all cells")
    parser.add_argument("--envs", nargs="+", choices=list(ENVS), default=list(ENVS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--folder", type=Path, default=Path("build/study_search"), help="where results are kept")
    parser.add_argument("--page", type=Path, help="the page whose table is written; default: printed only")
    parser.add_argument("--page-only", action="store_true", help="run nothing; write the page from existing results")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
