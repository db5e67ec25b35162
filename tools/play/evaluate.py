"""`slipstream eval`: measure success on held-out tasks, of a model with one engine on this machine, or of a server."""

import asyncio
import dataclasses
import json
import logging
from pathlib import Path

from slipstream.actors.episode.episode_record import Attempt, EpisodeRecord
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.actors.group.group import EpisodeSetup
from slipstream.actors.search.episode_tree import Collected, EpisodeTree
from slipstream.actors.search.stretch import play_stretch
from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.long_work import LongWork, report_on_stderr
from slipstream.common.records.reward_protocol import CRITICS
from slipstream.common.records.trajectory import Sampling, Task
from slipstream.common.text.action_format import action_format
from slipstream.envhub.catalogue import num_rows
from slipstream.tools.data.chat_file import ChatServer, read_chat_file
from slipstream.tools.play.collect import play_task
from slipstream.tools.play.collect_server import Served, served_setup
from slipstream.tools.play.eval_attempt import Played
from slipstream.tools.play.eval_options import EvalOptions
from slipstream.tools.play.eval_report import compared, report
from slipstream.tools.play.fixed_policy import attempt_at, fixed_tokenizer, start_fixed_policy
from slipstream.tools.play.state_values import StateValues, reward_model_beside
from slipstream.tools.run.check_input import check_collect
from slipstream.tools.run.collect_options import CollectOptions
from slipstream.tools.run.server_command import playing_on_servers
from slipstream.tools.terminal.table import print_rows

DEFAULT_NUM_TASKS = 100

log = logging.getLogger(__name__)


def evaluate(config: Config, *, options: EvalOptions) -> int:
    """Print success, tokens and more as one JSON line per format, environment and way of sampling.

    The model is `model.path` if given, else the trained model of `run.name`; a server's episodes are counted in its
    tokens. Several formats or searches play the same tasks, and a table of them follows.
    """
    log_to_stderr(logging.WARNING)
    for name in options.search:
        check_collect(config, CollectOptions(search=name))
    formats = options.compare or (config.env.action_format,)
    for env in (dataclasses.replace(config.env, action_format=name) for name in formats if options.server):
        check_collect(dataclasses.replace(config, env=env), CollectOptions(server=options.server))
    with playing_on_servers(config), reward_model_beside(config, options.reward_model) as values:
        check_no_critic(values)
        if options.server:
            server = read_chat_file(Path(options.server))
            setup = served_setup(config, server, fixed_tokenizer(config))
            asyncio.run(_evaluate(config, setup, options, values, server=server))
            return 0
        return evaluate_on(start_fixed_policy(config, name="eval", formats=formats), config, options, values=values)


def evaluate_on(stage: EpisodeSetup, config: Config, options: EvalOptions, *, values: StateValues | None = None) -> int:
    """Play the tasks on `stage`, and print the results. Raises ConfigError if every episode failed."""

    async def play_and_close() -> None:
        try:
            await _evaluate(config, stage, options, values)
        finally:
            await stage.engine.close()

    asyncio.run(play_and_close())
    return 0


def check_no_critic(values: StateValues | None) -> None:
    """Raise ConfigError for a critic."""
    if values and values.kind in CRITICS:
        raise ConfigError(
            f"`--reward-model` {values.name} is a critic: its value of a finished episode is the return itself, which "
            "is not known where attempts must be chosen; give a model of `slipstream fit prm` or `fit reward`"
        )


async def _evaluate(
    config: Config,
    stage: EpisodeSetup,
    options: EvalOptions,
    values: StateValues | None,
    *,
    server: ChatServer | None = None,
) -> None:
    formats = {
        name: dataclasses.replace(stage, action_format=action_format(name, config.env.formats))
        for name in options.compare or (config.env.action_format,)
    }
    greedy = dataclasses.replace(options, attempts=1, reward_model="")
    sampled = ("sampled", config.sampling.temperature, options, values)
    ways = [("server", 1.0, options, values)] if server else [sampled, ("greedy", 0.0, greedy, None)]
    tables = []
    for sampling, temperature, asked, judge in ways:
        for label in stage.envs:
            played = {}
            for name, setup in formats.items():
                test = _Test(
                    config=config, setup=setup, temperature=temperature, options=asked, values=judge, server=server
                )
                played[name] = await test.play_all(label)
                about = {"env": label, "sampling": sampling} | ({"format": name} if options.compare else {})
                about |= {"model": server.model} if server else {}
                print(json.dumps({**about, **report(played[name])}), flush=True)
            for search in options.search if sampling == "sampled" else ():
                played[search] = await dataclasses.replace(test, search=search).play_all(label)
                about = {"env": label, "sampling": sampling, "search": search}
                print(json.dumps({**about, **report(played[search])}), flush=True)
            tables.append((f"{label}, {sampling}", *compared(played)))
    for title, head, rows in (table for table in tables if len(table[2]) > 1):
        print(f"\n{title}: means, and 95 % intervals over tasks")
        print_rows(head, rows)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Test:
    """How the tasks of an evaluation are played."""

    config: Config
    setup: EpisodeSetup
    temperature: float
    options: EvalOptions
    values: StateValues | None
    server: ChatServer | None = None
    search: str = ""

    async def play_all(self, label: str) -> list[Played]:
        """Play every held-out task of an environment. Raises ConfigError if every episode failed."""
        num_tasks = self.config.eval.num_tasks or DEFAULT_NUM_TASKS
        num_tasks = min(num_tasks, num_rows(self.config.env.entries()[label]).get("held_out", num_tasks))
        tasks = [Task(env=label, split="held_out", index=index) for index in range(num_tasks)]
        room = asyncio.Semaphore(self.server.client.max_concurrent if self.server else self.config.actors.max_episodes)
        work = LongWork(f"episodes of {label}", num_tasks * self.options.attempts, report=report_on_stderr)
        by_task = await asyncio.gather(*(self._attempts(task, room, work) for task in tasks))
        played = [each for attempts in by_task for each in attempts]
        if not played:
            raise ConfigError("every episode failed; see the warnings above")
        return played

    async def _attempts(self, task: Task, room: asyncio.Semaphore, work: LongWork) -> list[Played]:
        """Play a task as often as the options want."""
        if self.search:
            return await self._searched(task, room, work)
        members = range(self.options.attempts)
        played = await asyncio.gather(*(self._play(task, member, room, work) for member in members))
        return [each for each in played if each is not None]

    async def _searched(self, task: Task, room: asyncio.Semaphore, work: LongWork) -> list[Played]:
        """The finished episode of the highest return that a search found, with the tokens of all that it tried."""
        found = Collected()
        tree = EpisodeTree(self._attempt(task, 0), setup=self.setup, room=room, collected=found)
        await play_task(tree, self.config, CollectOptions(search=self.search))
        work.done()
        best = max(found.trajectories, key=lambda trajectory: trajectory.total_reward, default=None)
        if best is None:
            return []
        return [dataclasses.replace(Played.of(best, action=None), num_written=found.num_sampled)]

    async def _play(self, task: Task, member: int, room: asyncio.Semaphore, work: LongWork) -> Played | None:
        """Play one episode; return None if its environment, the engine or the server of the reward model failed."""
        record = EpisodeRecord(attempt=self._attempt(task, member))
        sampler = Served(server=self.server, record=record, setup=self.setup) if self.server else None
        try:
            async with room:
                num_turns = self.setup.allowance.max_turns
                stretch = await play_stretch(record, setup=self.setup, num_turns=num_turns, sampler=sampler)
            value = float((await self.values.of_turns(stretch.record))[-1]) if self.values else None
        except EpisodeFailed as failure:
            log.warning("%s: %s", task.task_id, failure)
            return None
        finally:
            work.done()
        action = stretch.actions[-1] if stretch.exchanges else None
        return Played.of(stretch.record, action=action, value=value)

    def _attempt(self, task: Task, member: int) -> Attempt:
        max_turn_tokens = self.config.sampling.max_turn_tokens
        sampling = Sampling(temperature=self.temperature, top_p=1.0, top_k=0, max_turn_tokens=max_turn_tokens)
        return attempt_at(self.config, self.setup, task, sampling, group_id=task.index, member=member)
