"""`slipstream collect`: trajectories of a fixed model as rows, for rejection sampling, SFT, DPO and reward models.

What a search picked is no sample of the policy: the rows are for those, and never for an importance-corrected
objective.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterable
from pathlib import Path

from actors.engine import EngineDied
from actors.episode_tree import Collected, EpisodeTree
from actors.group import Stage
from actors.tape import Attempt
from actors.tree_search import START, dfsdt, mcts, tree_of_thoughts
from tools.collect_options import CollectConfig
from common.config import Config
from common.config_error import ConfigError
from common.trajectory import Sampling, Task, Trajectory
from common.transcript import Transcriber
from envhub.catalogue import DRIVING
from tools.fixed_policy import start_fixed_policy
from tools.replay.export import check_free, row_of, write_rows

PROGRESS_S = 5.0  # from one line to the next
STATE = "collected"


def collect(config: Config, *, path: Path, force: bool) -> int:
    """Play, and write one row a trajectory to `path`, whole or not at all. Raises ConfigError.

    The model is `model.path`, else the trained model of `run.name`.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    check_free(path, force=force)
    check_collect(config)
    return collect_on(start_fixed_policy(config, name="collect"), config, path=path)


def check_collect(config: Config) -> None:
    """Raise ConfigError where there are too few tasks, or a search is asked for that cannot be."""
    last = config.collect.first_task + config.collect.num_tasks
    if last > config.env.num_train_tasks:
        raise ConfigError(
            "`collect.first_task` + `collect.num_tasks` must be <= env.num_train_tasks = "
            f"{config.env.num_train_tasks}, got {last}; play fewer"
        )
    for part in config.env.parts().values():
        if part.name in DRIVING and config.collect.search != "none":
            raise ConfigError(
                f"`collect.search` must be none for `env.name` {part.name}, got {config.collect.search!r}; it plays "
                "its episodes itself, and none can be gone on with from the middle"
            )


def collect_on(stage: Stage, config: Config, *, path: Path) -> int:
    """Play on `stage` and write what came of it; return 0, or 130 after Ctrl-C and 1 where the engine died on the way.

    Either way what had come to its end by then is written. Raises ConfigError where there is nothing at all.
    """
    transcriber = Transcriber(stage.tokenizer)  # now, in case that the template is one that it cannot read
    collected, exit_code = Collected(), 0
    try:
        asyncio.run(_collect(stage, config, collected))
    except KeyboardInterrupt:
        exit_code = 130
        _say("stopped; what is over is written")
    except EngineDied as error:
        exit_code = 1
        _say(f"{error}; what is over is written")
    trajectories = _chosen(collected.trajectories, search=config.collect.search)
    if trajectories:
        write_rows(path, (row_of(trajectory, transcriber, state=STATE, step=None) for trajectory in trajectories))
        print(f"{path}: {_described(trajectories)}; {collected.num_turns} turns were generated")
    elif not exit_code:
        raise ConfigError("no episode could be had; the warnings above say why")
    else:
        _say(f"nothing is written to {path}: no episode was over")
    if collected.num_failed:
        _say(f"{collected.num_failed} episodes are left out: they failed by no doing of the policy's, as said above")
    return exit_code


async def _collect(stage: Stage, config: Config, collected: Collected) -> None:
    """Play every task, as many at a time as the engine has room for."""
    room = asyncio.Semaphore(config.actors.max_episodes)
    tasks_at_a_time = asyncio.Semaphore(config.actors.max_episodes)

    async def play(group_id: int, task: Task) -> None:
        async with tasks_at_a_time:
            attempt = _attempt(config, stage, task, group_id=group_id)
            tree = EpisodeTree(attempt, stage=stage, room=room, collected=collected)
            await _play(tree, config)
            collected.num_tasks += 1

    groups = _groups(config, stage)
    telling = asyncio.create_task(_tell(collected, num_tasks=len(groups)))
    try:
        await asyncio.gather(*(play(group_id, task) for group_id, task in groups.items()))
    finally:
        telling.cancel()
        await stage.engine.close()


def _groups(config: Config, stage: Stage) -> dict[int, Task]:
    """The tasks by group, which is a task's index where there is one environment: files of different tasks go together.

    In a mixture, the first task of each environment comes before the second of any.
    """
    first, labels = config.collect.first_task, list(stage.envs)
    return {
        index * len(labels) + place: Task(env=label, split="train", index=index)
        for index in range(first, first + config.collect.num_tasks)
        for place, label in enumerate(labels)
    }


def _attempt(config: Config, stage: Stage, task: Task, *, group_id: int) -> Attempt:
    sampling = config.sampling
    return Attempt(
        run_id=stage.run_id,
        task=task,
        group_id=group_id,
        member=0,
        attempt=0,
        actor=stage.actor,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_turn_tokens=sampling.max_turn_tokens,
        ),
        seed=config.run.seed,
        provenance=stage.provenance,
    )


async def _play(tree: EpisodeTree, config: Config) -> None:
    """Play one task. A search in which no episode came to its end goes on from the best state that it has found."""
    max_turns = config.env.max_turns
    if config.collect.search == "none":
        await asyncio.gather(*(tree.play_out(START, max_turns=max_turns) for _ in range(config.replay.group_size)))
        return
    await _search(tree, config.collect)
    if not tree.has_ended:
        await tree.play_out(tree.best, max_turns=max_turns)


async def _search(tree: EpisodeTree, settings: CollectConfig) -> None:
    match settings.search:
        case "tree_of_thoughts":
            await tree_of_thoughts(tree, width=settings.width, beam=settings.beam)
        case "dfsdt":
            await dfsdt(tree, width=settings.width, budget=settings.budget)
        case _:
            await mcts(tree, width=settings.width, budget=settings.budget, exploration=settings.exploration)


def _chosen(trajectories: Iterable[Trajectory], *, search: str) -> list[Trajectory]:
    """In order; and of a search each episode once, as playing on may come to an end that was come to before."""
    ordered = sorted(trajectories, key=lambda trajectory: (trajectory.group_id, trajectory.member))
    if search == "none":
        return ordered
    distinct: dict[tuple[int, bytes], Trajectory] = {}
    for trajectory in ordered:
        distinct.setdefault((trajectory.group_id, trajectory.tokens), trajectory)
    return list(distinct.values())


async def _tell(collected: Collected, *, num_tasks: int) -> None:
    """Say every PROGRESS_S how far it is."""
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(PROGRESS_S)
            solved = {trajectory.group_id for trajectory in collected.trajectories if trajectory.success}
            _say(
                f"{collected.num_tasks} of {num_tasks} tasks are played, {len(solved)} solved; "
                f"{collected.num_turns} turns were generated"
            )


def _described(trajectories: list[Trajectory]) -> str:
    tasks = {trajectory.group_id for trajectory in trajectories}
    solved = {trajectory.group_id for trajectory in trajectories if trajectory.success}
    num_good = sum(trajectory.success for trajectory in trajectories)
    return f"{len(trajectories)} trajectories of {len(tasks)} tasks, {num_good} successes in {len(solved)} of the tasks"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
