"""Measures an episode on an engine without cost: chat, environment and record, in wall-clock and CPU time."""

import asyncio
import copy
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from slipstream.actors.episode.allowance import Allowance
from slipstream.actors.episode.episode_record import Attempt, EpisodeRecord
from slipstream.actors.episode.rollout import rollout
from slipstream.common.config.config import Config
from slipstream.common.records.trajectory import Trajectory
from slipstream.common.text.action_format import ActionFormat, format_of
from slipstream.envhub.catalogue import make_env
from slipstream.tools.lab.bench.benchmark import Cost, Row, cost_of
from slipstream.tools.lab.soak.scripted_engine import Schedule, ScriptedEngine
from slipstream.tools.run.prepare import demonstrate

NUM_LANES = 32  # episodes that run at a time
EPISODES_PER_LANE = 4  # one after another
SCHEDULE = Schedule(prefill_s=0.05, token_time_s=0.02)  # about that of an 8B model on one GPU with 32 requests
AT_ONCE = Schedule(prefill_s=0.0, token_time_s=0.0)  # the process is never idle, as in an actor with all it can do
REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """Expert episodes that a scripted engine repeats token by token."""

    episodes: list[Trajectory]  # one of each task, which all siblings play
    answers: dict[tuple[int, ...], list[int]]  # prompt -> the tokens that followed
    config: Config
    tokenizer: PreTrainedTokenizerBase
    action_format: ActionFormat
    allowance: Allowance

    @property
    def group_size(self) -> int:
        return self.config.replay.group_size

    @property
    def num_turns(self) -> int:
        return self.group_size * sum(len(episode.turns) for episode in self.episodes)

    def engine(self, schedule: Schedule) -> ScriptedEngine:
        return ScriptedEngine(
            lambda prompt, _seed: self.answers[tuple(prompt)],
            policy_version=0,
            schedule=schedule,
            max_tokens=self.config.model.max_tokens,
        )


Lane = Callable[[Trajectory, Script, ScriptedEngine], Coroutine[Any, Any, None]]
"""What a lane does with an episode of the script."""


def episode_loop(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Lanes of real shop episodes, against as many lanes that only make the same `generate` calls."""
    script = _make_script(config, tokenizer)
    pairs, busy_pairs = _pairs(script, SCHEDULE), _pairs(script, AT_ONCE)
    return [
        Row.of(
            "episode loop: wall clock, against the engine's schedule alone",
            [loop.wall_s for loop, _ in pairs],
            unit="s",
            against=[bare.wall_s for _, bare in pairs],
            goal="ratio <= 1.02",
        ),
        _cpu_row("episode loop: CPU a turn, beside that of a bare scripted call", pairs, script.num_turns),
        _cpu_row("episode loop: CPU a turn, by an engine that answers at once", busy_pairs, script.num_turns),
    ]


def _pairs(script: Script, schedule: Schedule) -> list[tuple[Cost, Cost]]:
    """The cost of the episodes and of the bare calls, measured alternately."""

    def cost(one: Lane) -> Cost:
        # A new tokenizer, so that no text was encoded or rendered before: a later sibling finds it kept, not a repeat.
        fresh = replace(script, tokenizer=copy.deepcopy(script.tokenizer))
        return cost_of(_in_lanes(fresh, schedule, one))

    return [(cost(_play), cost(_only_generate)) for _ in range(REPEATS)]


def _cpu_row(name: str, pairs: Sequence[tuple[Cost, Cost]], num_turns: int) -> Row:
    per_turn = 1e3 / num_turns
    return Row.of(
        name,
        [per_turn * (loop.cpu_s - bare.cpu_s) for loop, bare in pairs],
        unit="ms",
        against=[per_turn * bare.cpu_s for _, bare in pairs],
        goal="value <= 0.3",
    )


def _make_script(config: Config, tokenizer: PreTrainedTokenizerBase) -> Script:
    config.warm_start.episodes = NUM_LANES * EPISODES_PER_LANE // config.replay.group_size
    episodes = list(demonstrate(config, tokenizer))
    answers: dict[tuple[int, ...], list[int]] = {}
    for episode in episodes:
        tokens = episode.token_array().tolist()
        answers |= {tuple(tokens[: turn.start]): tokens[turn.start : turn.stop] for turn in episode.turns}
    return Script(
        episodes=episodes,
        answers=answers,
        config=config,
        tokenizer=tokenizer,
        action_format=format_of(config.env),
        allowance=Allowance.of(config),
    )


async def _in_lanes(script: Script, schedule: Schedule, one: Lane) -> None:
    engine = script.engine(schedule)

    async def lane(number: int) -> None:
        await asyncio.sleep(number * schedule.token_time_s / 3)  # so that siblings do not act at the same moments
        for episode in script.episodes[number // script.group_size :: NUM_LANES // script.group_size]:
            await one(episode, script, engine)

    await asyncio.gather(*(lane(number) for number in range(NUM_LANES)))


async def _play(episode: Trajectory, script: Script, engine: ScriptedEngine) -> None:
    config = script.config
    env = make_env(config.env.name, config.env.options)
    attempt = Attempt(
        run_id=episode.run_id,
        task=episode.task,
        group_id=episode.group_id,
        member=0,
        attempt=0,
        actor=episode.actor,
        sampling=episode.sampling,
        seed=0,
        provenance=episode.provenance,
    )
    again = await rollout(
        EpisodeRecord(attempt=attempt),
        env=env,
        sampler=engine,
        tokenizer=script.tokenizer,
        action_format=script.action_format,
        allowance=script.allowance,
    )
    await env.close()
    assert again.tokens == episode.tokens, "the episode differs from its script"


async def _only_generate(episode: Trajectory, script: Script, engine: ScriptedEngine) -> None:
    tokens = episode.token_array().tolist()
    for turn in episode.turns:
        await engine.generate(tokens[: turn.start], episode.sampling)
