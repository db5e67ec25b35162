"""`slipstream collect`: play with a fixed model and write rows for rejection sampling, SFT, DPO or reward models.

A search chooses among actions, so its trajectories are not samples of the policy. Never train on them with an
importance-corrected objective.
"""

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec

from slipstream.actors.engine.engine import EngineDied
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.actors.group.group import EpisodeSetup
from slipstream.actors.search.episode_tree import Collected, EpisodeTree
from slipstream.actors.search.tree_search import EXPLORATION, START, dfsdt, graph_of_thoughts, mcts, tree_of_thoughts
from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.long_work import LongWork, report_on_stderr
from slipstream.common.records.trajectory import Sampling, Task, Trajectory
from slipstream.common.rows.row_source import Row
from slipstream.common.text.transcript import Transcriber
from slipstream.envhub.env import EnvError
from slipstream.tools.data.chat_file import read_chat_file
from slipstream.tools.data.row_files import rows_to, write_rows
from slipstream.tools.play.collect_server import Journal, play_served, scoring_of
from slipstream.tools.play.fixed_policy import attempt_at, fixed_tokenizer, start_fixed_policy
from slipstream.tools.play.state_values import StateValues, check_searches, reward_model_beside
from slipstream.tools.replay.trajectory_rows import row_of
from slipstream.tools.run.check_input import check_collect
from slipstream.tools.run.collect_options import DEFAULT_NUM_TASKS, CollectOptions
from slipstream.tools.run.prepare import expert_episodes
from slipstream.tools.run.server_command import playing_on_servers

BEAM = 2  # tree_of_thoughts: states expanded at each depth; graph_of_thoughts: attempts shown to a new one
STATE = "collected"


def collect(config: Config, *, path: Path, force: bool, options: CollectOptions) -> int:
    """Play, and write one row per trajectory to `path`, completely or not at all. Raises ConfigError.

    The model is `model.path` if given, else the trained model of `run.name`.
    """
    log_to_stderr(logging.WARNING)
    check_collect(config, options)
    with rows_to(path, force=force, inputs=[options.server]), playing_on_servers(config):
        if options.expert:
            return _collect_expert(config, options, path=path)
        if options.server:
            return _collect_served(config, options, path=path)
        if options.completions and path.suffix != ".jsonl":
            raise ConfigError(
                f"with `--completions` the file name must end in .jsonl, got {path}: it has a column `turn_labels`"
            )
        with reward_model_beside(config, options.reward_model) as values:
            check_searches(values)
            return collect_on(start_fixed_policy(config, name="collect"), config, options, path=path, values=values)


def _collect_expert(config: Config, options: CollectOptions, *, path: Path) -> int:
    """Have the expert play, without an engine, and write its trajectories in the tokens of the model. Return 0."""
    tokenizer = fixed_tokenizer(config)
    transcriber = Transcriber(tokenizer, model=config.model)
    tasks, scoring = tasks_to_play(options, config), scoring_of(config, tokenizer)
    try:
        trajectories = list(expert_episodes(config, tokenizer, tasks, noise=options.noise, scoring=scoring))
    except (EnvError, EpisodeFailed) as error:
        names = ", ".join(config.env.entries())
        raise ConfigError(f"`env.name` {names}: its expert failed to play: {error}") from error
    write_rows(path, (row_of(trajectory, transcriber, state=STATE, step=None) for trajectory in trajectories))
    print(f"{path}: {_described(trajectories)}, by the expert")
    return 0


def _collect_served(config: Config, options: CollectOptions, *, path: Path) -> int:
    """Have a chat server play, and write its episodes in the tokens of the model. Return 0, or 130 after Ctrl-C.

    What has ended is in a journal beside `path` until all rows are written, so the same command continues.
    """
    tokenizer = fixed_tokenizer(config)
    transcriber = Transcriber(tokenizer, model=config.model)
    server, tasks = read_chat_file(Path(options.server)), tasks_to_play(options, config)
    with Journal(path.with_name(f"{path.name}.journal"), config, server, vocab_size=len(tokenizer)) as journal:
        if any(
            tasks.get(group) != episode.task or member >= config.replay.group_size
            for (group, member), episode in journal.played.items()
        ):
            raise ConfigError(
                f"{journal.path} has episodes of other tasks, or more of each; repeat that command (--first-task, "
                "--num-tasks, --held-out and replay.group_size), or name another FILE"
            )
        try:
            num_failed = asyncio.run(play_served(config, server, tokenizer, tasks, journal=journal))
        except KeyboardInterrupt:
            report_on_stderr(
                f"stopped; {journal.path} keeps {len(journal.played)} episodes: the same command continues"
            )
            return 130
        trajectories = _chosen(journal.played.values(), search="none")
        if not trajectories:
            raise ConfigError("every episode failed; see the warnings above")
        write_rows(path, (row_of(trajectory, transcriber, state=STATE, step=None) for trajectory in trajectories))
        print(f"{path}: {_described(trajectories)}, by {server.model}")
        if num_failed:
            report_on_stderr(f"{num_failed} episodes failed; the same command with `--force` plays them again")
        else:
            journal.path.unlink()
    return 0


def collect_on(
    stage: EpisodeSetup, config: Config, options: CollectOptions, *, path: Path, values: StateValues | None = None
) -> int:
    """Play on `stage` and write the finished trajectories. Return 0, 130 after Ctrl-C, or 1 if the engine died.

    In all three cases the trajectories that have finished are written. Raises ConfigError if every episode failed.
    """
    # Before playing: it raises for a chat template that it cannot read.
    transcriber = Transcriber(stage.tokenizer, model=stage.allowance.model)
    collected, exit_code = Collected(), 0
    try:
        asyncio.run(_collect(stage, config, options, collected, values))
    except KeyboardInterrupt:
        exit_code = 130
        report_on_stderr("stopped; writing the finished trajectories")
    except EngineDied as error:
        exit_code = 1
        report_on_stderr(f"{error}; writing the finished trajectories")
    trajectories = _chosen(collected.trajectories, search=options.search)
    if options.completions:
        trajectories = [each for each in trajectories if (each.group_id, each.member) in collected.labels]
    if trajectories:
        rows = (row_of(trajectory, transcriber, state=STATE, step=None) for trajectory in trajectories)
        write_rows(path, map(partial(_labelled, collected=collected), rows) if options.completions else rows)
        print(f"{path}: {_described(trajectories)}; {collected.num_turns} turns were generated")
    elif not exit_code:
        raise ConfigError("every episode failed; see the warnings above")
    else:
        report_on_stderr(f"nothing is written to {path}: no episode has finished")
    if collected.num_failed:
        report_on_stderr(
            f"{collected.num_failed} episodes are left out: environment, engine or reward model failed, see the "
            "warnings above"
        )
    return exit_code


def _labelled(row: Row, collected: Collected) -> Row:
    """The row with a label for each message of the assistant's; null for those in the opening of the task."""
    labels = collected.labels[row["group_id"], row["member"]]
    replies = [message for message in row["messages"] or () if message["role"] == "assistant"]
    return row | {"turn_labels": [None] * (len(replies) - len(labels)) + labels}


async def _collect(
    stage: EpisodeSetup, config: Config, options: CollectOptions, collected: Collected, values: StateValues | None
) -> None:
    """Play every task, `actors.max_episodes` at a time."""
    room = asyncio.Semaphore(config.actors.max_episodes)
    tasks_at_a_time = asyncio.Semaphore(config.actors.max_episodes)
    sampling = msgspec.convert(config.sampling, Sampling, from_attributes=True)

    async def play(group_id: int, task: Task) -> None:
        async with tasks_at_a_time:
            attempt = attempt_at(config, stage, task, sampling, group_id=group_id)
            tree = EpisodeTree(
                attempt, setup=stage, room=room, collected=collected, values=values.of_state if values else None
            )
            await play_task(tree, config, options)
            collected.num_tasks += 1
            progress.at(collected.num_tasks, more=f"{collected.num_turns} turns were generated")

    groups = tasks_to_play(options, config)
    progress = LongWork("tasks", len(groups), report=report_on_stderr)
    try:
        await asyncio.gather(*(play(group_id, task) for group_id, task in groups.items()))
    finally:
        await stage.engine.close()


def tasks_to_play(options: CollectOptions, config: Config) -> dict[int, Task]:
    """The tasks by group id.

    With one environment the group id is the index of the task, so files of different tasks can be concatenated. In a
    mixture, the first task of every environment comes before the second task of any. One with fewer tasks than are
    asked for begins again with its first, and plays each once.
    """
    first, known = options.first_task, options.known_tasks(config.env)
    return {
        index * len(known) + place: Task(env=label, split=options.split, index=index % num_tasks)
        for index in range(first, first + (options.num_tasks or DEFAULT_NUM_TASKS))
        for place, (label, num_tasks) in enumerate(known.items())
        if index < num_tasks + (first if options.num_tasks else 0)
    }


async def play_task(tree: EpisodeTree, config: Config, options: CollectOptions) -> None:
    """Play one task. If a search finishes no episode, one is played out from the best state that it has found."""
    max_turns = config.env.max_turns
    if options.completions:
        played = await asyncio.gather(*(tree.walk() for _ in range(config.replay.group_size)))
        whole = [each for each in played if each is not None]
        await asyncio.gather(
            *(tree.label(each, num_completions=options.completions, max_turns=max_turns) for each in whole)
        )
        return
    match options.search:
        case "none":
            await asyncio.gather(*(tree.play_out(START, max_turns=max_turns) for _ in range(config.replay.group_size)))
            return
        case "tree_of_thoughts":
            await tree_of_thoughts(tree, width=options.width, beam=BEAM)
        case "dfsdt":
            await dfsdt(tree, width=options.width, budget=options.budget)
        case "graph_of_thoughts":
            await graph_of_thoughts(tree, width=options.width, beam=BEAM, budget=options.budget)
        case _:
            await mcts(tree, width=options.width, budget=options.budget, exploration=EXPLORATION)
    if not tree.has_ended:
        await tree.play_out(tree.best, max_turns=max_turns)


def _chosen(trajectories: Iterable[Trajectory], *, search: str) -> list[Trajectory]:
    """Sort the trajectories. A search may reach the same end twice, so its duplicates are dropped."""
    ordered = sorted(trajectories, key=lambda trajectory: (trajectory.group_id, trajectory.member))
    if search == "none":
        return ordered
    distinct: dict[tuple[int, bytes], Trajectory] = {}
    for trajectory in ordered:
        distinct.setdefault((trajectory.group_id, trajectory.tokens), trajectory)
    return list(distinct.values())


def _described(trajectories: list[Trajectory]) -> str:
    tasks = {trajectory.group_id for trajectory in trajectories}
    solved = {trajectory.group_id for trajectory in trajectories if trajectory.success}
    num_good = sum(trajectory.success for trajectory in trajectories)
    return f"{len(trajectories)} trajectories of {len(tasks)} tasks, {num_good} successes in {len(solved)} of the tasks"
