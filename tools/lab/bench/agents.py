"""`make bench-agents`: agents on the endpoint beside the built-in loop, with the same episodes and parsers.

A scripted engine writes what an expert does: a thought, and the action as a call of a tool, which vLLM's parsers read.
docs/benchmarks.md has the method.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.vllm_environment import vllm_environment
from slipstream.actors.episode.rollout import Allowance, rollout
from slipstream.actors.episode.tape import Attempt, Tape
from slipstream.common.config.env_config import EnvConfig
from slipstream.common.process.log import log_to_stderr
from slipstream.common.records.tool_call import ParsedAnswer
from slipstream.common.records.trajectory import Provenance, Sampling, Task, Trajectory
from slipstream.common.text.action_format import ToolCalls
from slipstream.envhub.catalogue import make_any_env
from slipstream.envhub.driving import Parse
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.tools.lab.bench.benchmark import Cost, Row, Run, cost_of
from slipstream.tools.lab.bench.load.shop_agent import SOCKET
from slipstream.tools.lab.bench.tiny_caller import CLOSING, OPENING, THOUGHT, THOUGHT_END, add_calls
from slipstream.tools.lab.soak.scripted_engine import Schedule, ScriptedEngine
from slipstream.tools.run.prepare import vocabulary_texts
from slipstream.tools.run.tiny_model import END_OF_TURN, tiny_tokenizer

NUM_EPISODES = 64  # at a time
NUM_COUNTED = 64  # episodes of an actor that plays without pause; those that begin before and after are not
ANY_WORDS = range(20, 181)  # of a thought, by chance
AS_MANY_WORDS = range(100, 101)
SCHEDULE = Schedule(prefill_s=0.05, token_time_s=0.02)  # about that of an 8B model on one GPU
AT_ONCE = Schedule(token_time_s=0.0)
ALLOWANCE = Allowance(max_turns=16, max_tokens=4096, step_timeout_s=600.0, episode_timeout_s=600.0)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=256)
TICK_S = 0.02
REPEATS = 2
CPU_REPEATS = 3
START_S = 60.0

Play = Callable[["Episode", "Script", ScriptedEngine], Coroutine[Any, Any, Trajectory]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One episode, and the number of its turns."""

    attempt: Attempt
    num_turns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What the expert writes in each episode, by the seed of the turn."""

    tokenizer: PreTrainedTokenizerBase
    parse: Parse
    episodes: list[Episode]
    answers: dict[int | None, list[int]]

    @property
    def num_turns(self) -> int:
        return sum(episode.num_turns for episode in self.episodes)

    def engine(self, schedule: Schedule) -> ScriptedEngine:
        return ScriptedEngine(
            lambda _, seed: self.answers[seed],
            policy_version=0,
            schedule=schedule,
            max_tokens=ALLOWANCE.max_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """Measurements of an actor that plays without pause."""

    episode_s: float  # mean duration of an episode
    late_s: float  # of 100 moments, the event loop is later than this in one


def main() -> int:
    """Measure, print, and write docs/benchmarks/agents.json; return 0 if every goal holds, else 1."""
    log_to_stderr(logging.WARNING)
    os.environ.update(vllm_environment())
    measuring = Run("agents")
    tokenizer = _tokenizer()
    long = asyncio.run(_script(tokenizer, NUM_EPISODES + NUM_COUNTED, ANY_WORDS))
    alike = asyncio.run(_script(tokenizer, NUM_EPISODES, AS_MANY_WORDS))
    with served_apart() as process:
        rows = _cpu_rows(alike, process)
    rows = [*_steady_rows(long), _burst_row(alike), *rows]
    return measuring.end(rows, versions={"openai": openai.__version__})


def _steady_rows(script: Script) -> list[Row]:
    pairs = [(asyncio.run(steady(as_agent, script)), asyncio.run(steady(built_in, script))) for _ in range(REPEATS)]
    return [
        Row.of(
            f"{NUM_EPISODES} running agents: time of an episode, against the built-in loop",
            [agents.episode_s for agents, _ in pairs],
            unit="s",
            against=[loop.episode_s for _, loop in pairs],
            goal="ratio <= 1.05",
        ),
        Row.of(
            f"{NUM_EPISODES} running agents: lateness of the event loop, 99th percentile, beside the built-in loop",
            [1e3 * agents.late_s for agents, _ in pairs],
            unit="ms",
            against=[1e3 * loop.late_s for _, loop in pairs],
        ),
    ]


def _burst_row(script: Script) -> Row:
    agents, loop = (cost_of(together(one, script, SCHEDULE)) for one in (as_agent, built_in))
    return Row.of(
        f"{NUM_EPISODES} agents that begin at once, with answers of one length: wall clock, against the built-in loop",
        [agents.wall_s],
        unit="s",
        against=[loop.wall_s],
        goal="ratio <= 1.05",
    )


def _cpu_rows(script: Script, process: psutil.Process) -> list[Row]:
    """The CPU of a call, on an engine that answers at once."""
    loop, agents, here, apart = list[float](), list[float](), list[float](), list[float]()
    for _ in range(1 + CPU_REPEATS):
        loop.append(_cpu_ms(script, cost_of(together(built_in, script, AT_ONCE))))
        agents.append(_cpu_ms(script, cost_of(together(as_agent, script, AT_ONCE))))
        before_s = _cpu_s(process)
        cost = cost_of(together(as_agent_apart, script, AT_ONCE))
        here.append(_cpu_ms(script, cost))
        apart.append(1e3 * (_cpu_s(process) - before_s) / script.num_turns)
    name = "CPU a call"
    return [
        Row.of(f"{name}: {what}", ours[1:], unit="ms", against=limit[1:])  # the first repeat loads what is cached
        for what, ours, limit in (
            ("the endpoint, beside a turn of the built-in loop", here, loop),
            ("the endpoint, beside the agent on OpenAI's SDK in another process", here, apart),
            ("endpoint and agent in one process, beside a turn of the built-in loop", agents, loop),
        )
    ]


def _cpu_ms(script: Script, cost: Cost) -> float:
    return 1e3 * cost.cpu_s / script.num_turns


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def served_apart() -> Iterator[psutil.Process]:
    """A process that plays the agents of `plays_apart`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "agents")
        os.environ[SOCKET] = str(path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slipstream.tools.lab.bench.load.shop_agent", str(path)]
        )
        try:
            deadline_s = time.monotonic() + START_S
            while not path.exists():
                assert process.poll() is None and time.monotonic() < deadline_s, "the agents' process does not start"
                time.sleep(0.05)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def _tokenizer() -> PreTrainedTokenizerBase:
    texts = vocabulary_texts(EnvConfig(name="shop", options={"profile": "small"}), 400)
    tokenizer = tiny_tokenizer(texts, ALLOWANCE.max_tokens)
    add_calls(tokenizer)
    return tokenizer


async def _script(tokenizer: PreTrainedTokenizerBase, num_episodes: int, num_words: Sequence[int]) -> Script:
    """The episodes of `num_episodes` tasks; each thought has one of `num_words` words."""
    words, chance = sorted(word for word in tokenizer.get_vocab() if word.isalpha()), random.Random(0)
    episodes, answers, shop = list[Episode](), dict[int | None, list[int]](), ShopEnv(profile="small")
    for index in range(num_episodes):
        attempt = _attempt(Task(env="shop", split="train", index=index))
        seen, turn = await shop.reset(attempt.task), 0
        while not seen.done:
            thought, action = " ".join(chance.choices(words, k=chance.choice(num_words))), shop.expert()
            answer = f"{THOUGHT}{thought}{THOUGHT_END}{OPENING}{action}{CLOSING}{END_OF_TURN}"
            answers[attempt.turn_seed(turn)] = tokenizer.encode(answer, add_special_tokens=False)
            seen, turn = await shop.step(action), turn + 1
        episodes.append(Episode(attempt=attempt, num_turns=turn))
    return Script(tokenizer=tokenizer, parse=_parse(tokenizer), episodes=episodes, answers=answers)


def _attempt(task: Task) -> Attempt:
    return Attempt(
        run_id="bench",
        task=task,
        group_id=task.index,
        member=0,
        attempt=0,
        actor="bench",
        sampling=SAMPLING,
        seed=0,
        provenance=Provenance(host="here", instance_kind="reserved", price_per_hour=0.0),
    )


def _parse(tokenizer: PreTrainedTokenizerBase) -> Parse:
    """vLLM's parsers in this process, where an actor has them in its engine's."""
    from slipstream.actors.engine.answer_parser import AnswerParser  # vLLM reads environment variables at import
    from slipstream.actors.engine.orders import Parse as Order

    parser = AnswerParser(tokenizer, tool_parser="hermes", reasoning_parser="qwen3", template_arguments={})

    async def parse(text: str, *, tokens: list[int], prompt: list[int], tools: list[dict[str, Any]]) -> ParsedAnswer:
        return parser.parsed(Order(call=0, prompt=prompt, tokens=tokens, text=text, tools=tools))

    return parse


async def together(one: Play, script: Script, schedule: Schedule) -> None:
    """Play all episodes at once, each one time."""
    engine = script.engine(schedule)
    async with asyncio.TaskGroup() as group:
        for episode in script.episodes:
            group.create_task(_checked(one, episode, script, engine))


async def steady(one: Play, script: Script) -> Steady:
    """Play as an actor does: NUM_EPISODES at a time, each replaced when it ends, until all that count have ended.

    The first NUM_EPISODES do not count, as they begin at the same moment. After the last that counts has begun, others
    are repeated until it ends, so that it never plays with fewer others.
    """
    engine, numbers = script.engine(SCHEDULE), itertools.count()
    durations_s, late_s = list[float](), list[float]()

    async def lane() -> None:
        while len(durations_s) < len(script.episodes) - NUM_EPISODES:
            number = next(numbers)
            if number == NUM_EPISODES:
                late_s.clear()
            started_s = time.perf_counter()
            await _checked(one, script.episodes[number % len(script.episodes)], script, engine)
            if NUM_EPISODES <= number < len(script.episodes):
                durations_s.append(time.perf_counter() - started_s)

    noting = asyncio.create_task(_note_lateness(late_s))
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_EPISODES):
            group.create_task(lane())
    noting.cancel()
    return Steady(episode_s=statistics.fmean(durations_s), late_s=statistics.quantiles(late_s, n=100)[-1])


async def _note_lateness(late_s: list[float]) -> None:
    """Add how much later than asked the event loop continues this coroutine, again and again."""
    time_s = asyncio.get_running_loop().time
    while True:
        due_s = time_s() + TICK_S
        await asyncio.sleep(TICK_S)
        late_s.append(time_s() - due_s)


async def _checked(one: Play, episode: Episode, script: Script, engine: ScriptedEngine) -> None:
    played = await one(episode, script, engine)
    assert played.success and len(played.branch_starts) == 1 and len(played.turns) == episode.num_turns


async def built_in(episode: Episode, script: Script, engine: ScriptedEngine) -> Trajectory:
    return await _rolled_out(ShopEnv(profile="small"), episode, script, engine)


async def as_agent(episode: Episode, script: Script, engine: ScriptedEngine) -> Trajectory:
    return await _rolled_out(_agent("plays"), episode, script, engine)


async def as_agent_apart(episode: Episode, script: Script, engine: ScriptedEngine) -> Trajectory:
    return await _rolled_out(_agent("plays_apart"), episode, script, engine)


def _agent(name: str) -> Any:
    return make_any_env("agent", {"agent": f"slipstream.tools.lab.bench.load.shop_agent:{name}"})


async def _rolled_out(env: Any, episode: Episode, script: Script, engine: ScriptedEngine) -> Trajectory:
    return await rollout(
        Tape(attempt=episode.attempt),
        env=env,
        sampler=engine,
        tokenizer=script.tokenizer,
        action_format=ToolCalls(),
        allowance=ALLOWANCE,
        parse=script.parse,
    )


if __name__ == "__main__":
    sys.exit(main())
