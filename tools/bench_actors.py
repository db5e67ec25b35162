"""`make bench-actors`: what the actors' own code costs, beside what the engine alone would take.

Three parts, each measured by turns with its limit: the episode loop against the scripted engine's schedule, the whole
loop against vLLM generating the same tokens offline, and the pause of a refresh against the time of a token.
docs/benchmarks.md says how.
"""

import asyncio
import gc
import importlib.metadata
import itertools
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from actors.act import act, make_stage
from actors.group import Stage
from actors.receive import ReceiverInfo
from actors.rollout import Allowance, rollout
from actors.scripted_engine import Schedule, ScriptedEngine
from actors.tape import Attempt
from actors.vllm_engine import VllmEngine, prepare_environment
from common.action_format import FORMATS
from common.config import Config, load_config
from common.connection import connect
from common.shutdown import Shutdown
from common.trajectory import Sampling, Task, Trajectory
from envhub.catalogue import make_env
from learner.lead import Links, join_run
from learner.publish import Publisher
from replay.fleet import RunState
from replay.server import start_server
from replay.ticket import Ticket
from tools import benchmark
from tools.benchmark import Benchmark, Row
from tools.prepare import demonstrate, load_tokenizer, model_folder, prepare

CONFIG = "conf/quickstart.yaml"
NUM_EPISODES = 32  # at a time, in the episode loop
EPISODES_PER_LANE = 8  # one after the other
SCHEDULE = Schedule(prefill_s=0.05, token_time_s=0.02)  # about that of an 8B model on one GPU, under 32 requests
LOOP_REPEATS = 3
NUM_GROUPS = 24  # in one repeat of the whole loop
WHOLE_REPEATS = 5
NUM_RUNNING = 16  # generations at a time, under a refresh
NUM_REFRESHES = 15
POLL_S = 0.02
TIMEOUT_S = 120.0


def main() -> int:
    """Measure, print, and write docs/benchmarks/actors.json; return 0 when every goal holds, else 1."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    load_before, started = os.getloadavg()[0], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-actors-") as root:
        config = load_config(CONFIG, [f"run.root={root}", "run.name=bench-actors", "warm_start.episodes=0"])
        folder = model_folder(config, prepare(config))
        rows = [*episode_loop(config, load_tokenizer(folder))]
        with _a_run(config, folder, Path(root)) as run:
            rows += [whole_loop(run), refresh(run)]
    result = Benchmark(
        name="actors",
        date=benchmark.today(),
        command="make bench-actors",
        machine=benchmark.describe_machine(
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            versions={"torch": torch.__version__, "vllm": _vllm_version()},
            load_before=load_before,
        ),
        wall_s=round(time.perf_counter() - started, 1),
        rows=rows,
    )
    benchmark.show(result)
    print(f"written to {benchmark.write(result)}")
    return 0 if all(row.holds in (True, None) for row in rows) else 1


# --- The episode loop, on an engine that costs nothing.


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """Expert episodes, for an engine to play again word for word."""

    episodes: list[Trajectory]
    answers: dict[tuple[int, ...], list[int]]  # prompt -> what was written
    config: Config
    tokenizer: PreTrainedTokenizerBase

    @property
    def num_turns(self) -> int:
        return sum(len(episode.turns) for episode in self.episodes)

    def engine(self) -> ScriptedEngine:
        return ScriptedEngine(
            lambda prompt, _seed: self.answers[tuple(prompt)],
            policy_version=0,
            schedule=SCHEDULE,
            max_tokens=self.config.model.max_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    wall_s: float
    cpu_s: float  # of this process


def episode_loop(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[Row, Row]:
    """Lanes of real shop episodes, beside as many lanes that make the same `generate` calls and nothing else."""
    script = _make_script(config, tokenizer)
    pairs = [
        (_cost(lambda: _in_lanes(script, _play)), _cost(lambda: _in_lanes(script, _only_generate)))
        for _ in range(LOOP_REPEATS)
    ]
    per_turn = 1e3 / script.num_turns
    return (
        Row.of(
            "episode loop: wall clock, against the engine's schedule alone",
            [loop.wall_s for loop, _ in pairs],
            unit="s",
            against=[bare.wall_s for _, bare in pairs],
            goal="ratio <= 1.02",
        ),
        Row.of(
            "episode loop: CPU a turn, beside that of a bare scripted call",
            [per_turn * (loop.cpu_s - bare.cpu_s) for loop, bare in pairs],
            unit="ms",
            against=[per_turn * bare.cpu_s for _, bare in pairs],
            goal="value <= 0.3",
        ),
    )


def _make_script(config: Config, tokenizer: PreTrainedTokenizerBase) -> Script:
    config.warm_start.episodes = NUM_EPISODES * EPISODES_PER_LANE
    episodes = list(demonstrate(config, tokenizer))
    answers = {}
    for episode in episodes:
        tokens = episode.token_array().tolist()
        answers |= {tuple(tokens[: turn.start]): tokens[turn.start : turn.stop] for turn in episode.turns}
    return Script(episodes=episodes, answers=answers, config=config, tokenizer=tokenizer)


async def _in_lanes(
    script: Script, one: Callable[[Trajectory, Script, ScriptedEngine], Coroutine[Any, Any, None]]
) -> None:
    engine = script.engine()

    async def lane(number: int) -> None:
        for episode in script.episodes[number::NUM_EPISODES]:
            await one(episode, script, engine)

    await asyncio.gather(*(lane(number) for number in range(NUM_EPISODES)))


async def _play(episode: Trajectory, script: Script, engine: ScriptedEngine) -> None:
    config = script.config
    env = make_env(config.env.name, config.env.options)
    again = await rollout(
        Attempt(
            run_id=episode.run_id,
            task=episode.task,
            group_id=episode.group_id,
            member=0,
            attempt=0,
            actor=episode.actor,
            sampling=episode.sampling,
            seed=0,
            provenance=episode.provenance,
        ),
        env=env,
        sampler=engine,
        tokenizer=script.tokenizer,
        action_format=FORMATS[config.env.action_format],
        allowance=Allowance(
            max_turns=config.env.max_turns,
            max_tokens=config.model.max_tokens,
            step_timeout_s=config.env.step_timeout_s,
            episode_timeout_s=config.env.episode_timeout_s,
        ),
    )
    await env.close()
    assert again.tokens == episode.tokens, "the script was not played word for word"


async def _only_generate(episode: Trajectory, script: Script, engine: ScriptedEngine) -> None:
    tokens = episode.token_array().tolist()
    for turn in episode.turns:
        await engine.generate(tokens[: turn.start], episode.sampling)


def _cost(run: Callable[[], Coroutine[Any, Any, None]]) -> Cost:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    asyncio.run(run())
    return Cost(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)


# --- The whole loop and the refresh, on vLLM and a Redis of their own.


@dataclass(frozen=True, kw_only=True, slots=True)
class ARun:
    """What a learner and an actor would have, in one process."""

    config: Config
    folder: Path
    links: Links
    stage: Stage
    engine: VllmEngine
    offline: Any  # vLLM's LLMEngine, started as the actor's is
    publisher: Publisher
    shutdown: Shutdown


@contextmanager
def _a_run(config: Config, folder: Path, root: Path) -> Iterator[ARun]:
    from actors.vllm_start import start_vllm  # vLLM reads the environment while it is imported

    tokenizer = load_tokenizer(folder)
    with start_server(root / "redis") as server:
        links = join_run(connect(server.secret_url), config, model_folder=folder, vocab_size=len(tokenizer))
        receiver = ReceiverInfo(
            redis_url=server.secret_url,
            run_id=config.run.name,
            actor="actor",
            transport="pull",
            chunk_bytes=config.weights.chunk_bytes,
            timeout_s=TIMEOUT_S,
        )
        engine = VllmEngine(
            str(folder),
            policy_version=0,
            seed=config.run.seed,
            max_tokens=config.model.max_tokens,
            dtype=config.model.dtype,
            kv_cache_bytes=config.actors.kv_cache_bytes,
            max_episodes=config.actors.max_episodes,
            kv_policy=config.actors.kv_policy,
            receiver=receiver,
        )
        offline = start_vllm(
            str(folder),
            receiver,
            policy_version=0,
            seed=config.run.seed,
            dtype=config.model.dtype,
            max_model_len=config.model.max_tokens,
            kv_cache_memory_bytes=config.actors.kv_cache_bytes,
            max_num_seqs=config.actors.max_episodes,
        )
        publisher = Publisher(
            redis_url=server.secret_url,
            run_id=config.run.name,
            learner_epoch=links.epoch,
            host=config.weights.host,
            chunk_bytes=config.weights.chunk_bytes,
            broadcast_timeout_s=config.weights.broadcast_timeout_s,
            log_path=root / "publisher.log",
        )
        stage = make_stage(engine, name="actor", run=config, actors=config.actors, model_path=folder)
        try:
            yield ARun(
                config=config, folder=folder, links=links, stage=stage, engine=engine, offline=offline,
                publisher=publisher, shutdown=Shutdown(),
            )  # fmt: skip
        finally:
            publisher.close()
            offline.engine_core.shutdown()
            asyncio.run(engine.close())


def whole_loop(run: ARun) -> Row:
    """Tokens per second from ticket to insert, beside the same prompts and lengths given to vLLM all at once."""
    run.links.fleet.set_run_state(RunState.TRAINING)
    looped, offline = [], []
    for repeat in range(WHOLE_REPEATS + 1):
        seconds, trajectories = _act_out(run, first_group_id=repeat * NUM_GROUPS)
        turns = _turns_in_order(trajectories)
        num_tokens = sum(turn.num_tokens for turn in turns)
        offline_s = _generate_offline(run.offline, turns, run.stage)
        if repeat:  # the first one warms both up
            looped.append(num_tokens / seconds)
            offline.append(num_tokens / offline_s)
    return Row.of(
        "whole loop: generated tokens, against vLLM offline", looped, unit="tokens/s", against=offline,
        goal="ratio >= 0.9",
    )  # fmt: skip


def _act_out(run: ARun, *, first_group_id: int) -> tuple[float, list[Trajectory]]:
    """Open NUM_GROUPS tickets, let the actor play them; return the seconds to the last insert, and what was played."""
    config, train = run.config, run.links.train
    sampling = Sampling(
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        max_turn_tokens=config.sampling.max_turn_tokens,
    )
    train.open(
        Ticket(
            group_id=group_id,
            task=Task(env=config.env.name, split="train", index=group_id),
            num_members=config.replay.group_size,
            min_policy_version=0,
            sampling=sampling,
            seed=config.run.seed,
        )
        for group_id in range(first_group_id, first_group_id + NUM_GROUPS)
    )
    run.shutdown.requested.clear()
    gc.collect()
    seconds = asyncio.run(_act_until_ready(run))
    groups = train.claim(first_group_id + 1, NUM_GROUPS, policy_version=0, max_lag=0)
    return seconds, [trajectory for group in groups for trajectory in group.trajectories]


async def _act_until_ready(run: ARun) -> float:
    started = time.perf_counter()
    acting = asyncio.create_task(
        act(
            run.stage,
            buffers={"train": run.links.train},
            bulletin=run.links.bulletin,
            fleet=run.links.fleet,
            actors=run.config.actors,
            shutdown=run.shutdown,
        )
    )
    async with asyncio.timeout(TIMEOUT_S):
        while (await asyncio.to_thread(run.links.train.ledger)).ready < NUM_GROUPS:
            await asyncio.sleep(POLL_S)
    seconds = time.perf_counter() - started
    run.shutdown.requested.set()
    await acting
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnToMake:
    """A prompt, and how many tokens were generated after it."""

    prompt: list[int]
    num_tokens: int
    asked_at_s: float


def _turns_in_order(trajectories: list[Trajectory]) -> list[TurnToMake]:
    """Every turn, in the order in which the loop asked for them: so the prefix cache finds as much as it did there."""
    turns = []
    for trajectory in trajectories:
        tokens, now_s = trajectory.token_array().tolist(), trajectory.started_at_s
        for turn in trajectory.turns:
            branch = max(start for start in trajectory.branch_starts if start < turn.start)
            turns.append(
                TurnToMake(prompt=tokens[branch : turn.start], num_tokens=turn.stop - turn.start, asked_at_s=now_s)
            )
            now_s += turn.generate_s + turn.env_s
    return sorted(turns, key=lambda turn: turn.asked_at_s)


def _generate_offline(llm: Any, turns: list[TurnToMake], stage: Stage, seed: bool = True) -> float:
    """Seconds for vLLM to make every turn at its recorded length, all of them asked for at once."""
    from actors.vllm_start import sampling_params

    llm.reset_prefix_cache()
    gc.collect()
    started = time.perf_counter()
    for number, turn in enumerate(turns):
        params = sampling_params(
            Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=turn.num_tokens),
            num_tokens=turn.num_tokens, seed=number if seed else None, stop_token_ids=[],
        )  # fmt: skip
        params.ignore_eos = True
        llm.add_request(str(number), {"type": "token", "prompt_token_ids": turn.prompt}, params)
    num_tokens = 0
    while llm.has_unfinished_requests():
        num_tokens += sum(len(output.outputs[0].token_ids) for output in llm.step())
    assert num_tokens == sum(turn.num_tokens for turn in turns), "vLLM stopped early"
    return time.perf_counter() - started


@dataclass(kw_only=True, slots=True)
class Pace:
    """How fast tokens come while no refresh falls into a generation."""

    token_times_s: list[float]  # of each generation since the last look: its seconds / its tokens


def refresh(run: ARun) -> Row:
    """The pause of a commit under NUM_RUNNING generations, beside the time between two of their tokens."""
    pauses_s, token_times_s = asyncio.run(_refreshed(run))
    return Row.of(
        "refresh: pause, in token times", [1e3 * pause_s for pause_s in pauses_s], unit="ms",
        against=[1e3 * token_time_s for token_time_s in token_times_s],
    )  # fmt: skip


async def _refreshed(run: ARun) -> tuple[list[float], list[float]]:
    weights = list(load_file(run.folder / "model.safetensors").items())
    pace, seeds = Pace(token_times_s=[]), itertools.count()
    pauses_s, token_times_s = [], []
    lanes = [asyncio.create_task(_generate_on(run, pace, seeds)) for _ in range(NUM_RUNNING)]
    async with asyncio.timeout(TIMEOUT_S):
        for version in range(1, NUM_REFRESHES + 1):
            pace.token_times_s.clear()
            while len(pace.token_times_s) < NUM_RUNNING:
                await asyncio.sleep(POLL_S)
            token_times_s.append(statistics.median(pace.token_times_s))
            run.publisher.publish(weights, policy_version=version)
            while (offer := run.links.bulletin.latest()) is None or offer.manifest.policy_version < version:
                await asyncio.sleep(POLL_S)
            await run.engine.stage(offer)
            pauses_s.append(await run.engine.commit(version))
    for lane in lanes:
        lane.cancel()
    await asyncio.gather(*lanes, return_exceptions=True)
    return pauses_s, token_times_s


async def _generate_on(run: ARun, pace: Pace, seeds: Iterator[int]) -> None:
    """One generation after the other, each as long as the context allows."""
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=run.config.model.max_tokens)
    while True:
        seed = next(seeds)
        started = time.perf_counter()
        completion = await run.engine.generate([5 + seed % 50] * 32, sampling, seed=seed)
        if len(completion.version_spans) == 1:
            pace.token_times_s.append((time.perf_counter() - started) / len(completion.tokens))


def _vllm_version() -> str:
    names = importlib.metadata.packages_distributions()["vllm"]
    return importlib.metadata.version(names[0])


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main())
