"""`make bench-actors`: measure the cost of the actors' code against the time of the engine alone.

It has two parts, each measured alternately with its limit: the episode loop against the schedule of a scripted engine,
and the whole loop against vLLM generating the same tokens offline. docs/benchmarks.md has the method.
"""

import asyncio
import gc
import importlib.metadata
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.actors.engine.vllm_environment import vllm_environment
from slipstream.actors.group.group import EpisodeSetup
from slipstream.actors.host.act import act, make_setup
from slipstream.common.config.config import Config, load_config
from slipstream.common.process.connection import connect
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.trajectory import Sampling, Task, Trajectory
from slipstream.learner.lead.connections import Connections
from slipstream.learner.supply.supply import ticket_of
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.fleet.fleet import RunState
from slipstream.tools.lab.bench import benchmark
from slipstream.tools.lab.bench.benchmark import Row, cost_of
from slipstream.tools.lab.bench.load.an_engine import an_engine
from slipstream.tools.lab.bench.load.episode_loop import episode_loop
from slipstream.tools.run.prepare import load_tokenizer, model_folder, prepare

CONFIG = Path(__file__).parents[3] / "conf" / "quickstart.yaml"
NUM_GROUPS = 128  # in one repeat of the whole loop; so many that its end, with few episodes, hardly counts
NUM_WARM_UP_GROUPS = 8
WHOLE_REPEATS = 5
POLL_S = 0.1
TIMEOUT_S = 300.0


def main() -> int:
    """Measure, print, and write docs/benchmarks/actors.json; return 0 if every goal holds, else 1."""
    log_to_stderr(logging.WARNING)
    measuring = benchmark.Run("actors")
    with tempfile.TemporaryDirectory(prefix="bench-actors-") as root:
        config = load_config(str(CONFIG), [f"run.root={root}", "run.name=bench-actors", "warm_start.episodes=0"])
        folder = model_folder(config, prepare(config))
        rows = episode_loop(config, load_tokenizer(folder, config.model))
        with _a_run(config, folder, Path(root)) as run:
            rows += whole_loop(run)
    vllm = importlib.metadata.packages_distributions()["vllm"][0]  # its name depends on the build
    return measuring.end(
        rows,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        versions={"torch": str(torch.__version__), "vllm": importlib.metadata.version(vllm)},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ARun:
    """The parts of a learner and an actor in one process, and an offline vLLM to compare with."""

    config: Config
    connections: Connections
    buffer: ActorBuffer
    stage: EpisodeSetup
    offline: Any  # vLLM's LLMEngine, started with the settings of the actor's


@contextmanager
def _a_run(config: Config, folder: Path, root: Path) -> Iterator[ARun]:
    from slipstream.actors.engine.vllm_start import start_vllm  # vLLM reads environment variables at import

    with an_engine(config, folder, root) as (connections, engine, settings):
        offline = start_vllm(settings)
        tokenizer, client = load_tokenizer(folder, config.model), connect(settings.receiver.redis_url)
        try:
            yield ARun(
                config=config,
                connections=connections,
                buffer=ActorBuffer(client, config.run.name, config.replay, vocab_size=len(tokenizer)),
                stage=make_setup(engine, name="actor", run=config, actors=config.actors, tokenizer=tokenizer),
                offline=offline,
            )
        finally:
            client.close()
            offline.engine_core.shutdown()


def whole_loop(run: ARun) -> tuple[Row, Row]:
    """Tokens per second from ticket to insert, against the same prompts and lengths given to vLLM all at once."""
    run.connections.fleet.set_run_state(RunState.TRAINING)
    first_group_id = 0
    _act_out(run, first_group_id, NUM_WARM_UP_GROUPS)
    first_group_id += NUM_WARM_UP_GROUPS
    repeats = []
    for _ in range(WHOLE_REPEATS):
        looped_s, trajectories = _act_out(run, first_group_id, NUM_GROUPS)
        first_group_id += NUM_GROUPS
        turns = turns_in_order(trajectories, temperature=run.config.sampling.temperature)
        offline = cost_of(_generate_offline(run.offline, turns))
        unseeded = cost_of(_generate_offline(run.offline, [replace(turn, seed=None) for turn in turns]))
        repeats.append((sum(turn.num_tokens for turn in turns), looped_s, offline, unseeded))
    tokens_per_s = [num_tokens / looped_s for num_tokens, looped_s, _, _ in repeats]
    return (
        Row.of(
            "whole loop: generated tokens, against vLLM offline",
            tokens_per_s,
            unit="tokens/s",
            against=[num_tokens / offline.wall_s for num_tokens, _, offline, _ in repeats],
            goal="ratio >= 0.9",
        ),
        Row.of(
            "whole loop: generated tokens, against vLLM offline without seeds",
            tokens_per_s,
            unit="tokens/s",
            against=[num_tokens / offline.wall_s for num_tokens, _, _, offline in repeats],
            goal="ratio >= 0.97",
        ),
    )


def _act_out(run: ARun, first_group_id: int, num_groups: int) -> tuple[float, list[Trajectory]]:
    """Open tickets and let the actor play them; return the seconds until the last episode ended, and the episodes."""
    config, train = run.config, run.connections.train
    group_ids = range(first_group_id, first_group_id + num_groups)
    train.open(
        ticket_of(group_id, Task(env=config.env.name, split="train", index=group_id), config, min_policy_version=0)
        for group_id in group_ids
    )
    gc.collect()
    started_at_s = time.time()
    asyncio.run(_act_until_ready(run, num_groups))
    groups = train.claim(group_ids[-1], num_groups, policy_version=0, max_lag=0)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    ended_at_s = max(trajectory.started_at_s + trajectory.duration_s for trajectory in trajectories)
    return ended_at_s - started_at_s, trajectories


async def _act_until_ready(run: ARun, num_groups: int) -> None:
    learner, shutdown = run.connections.train, Shutdown()
    acting = asyncio.create_task(
        act(
            run.stage,
            buffers={"train": run.buffer},
            bulletin=run.connections.bulletin,
            fleet=run.connections.fleet,
            actors=run.config.actors,
            shutdown=shutdown,
        )
    )
    async with asyncio.timeout(TIMEOUT_S):
        while not acting.done() and (await asyncio.to_thread(learner.ledger)).ready < num_groups:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        if acting.done():  # it failed, or was interrupted
            sys.exit(acting.result())
        shutdown.requested.set()
        await acting


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnToMake:
    """A prompt, and the number of tokens that were generated after it."""

    prompt: list[int]
    num_tokens: int
    temperature: float
    seed: int | None
    asked_at_s: float


def turns_in_order(trajectories: list[Trajectory], *, temperature: float) -> list[TurnToMake]:
    """Every turn, in the order in which the loop requested them, so that the prefix cache has as many hits as there."""
    turns: list[TurnToMake] = []
    for trajectory in trajectories:
        tokens, now_s = trajectory.token_array().tolist(), trajectory.started_at_s
        for turn in trajectory.turns:
            branch_start = max(start for start in trajectory.branch_starts if start < turn.start)
            turns.append(
                TurnToMake(
                    prompt=tokens[branch_start : turn.start],
                    num_tokens=turn.stop - turn.start,
                    temperature=temperature,
                    seed=len(turns),
                    asked_at_s=now_s,
                )
            )
            now_s += turn.generate_s + turn.env_s
    return sorted(turns, key=lambda turn: turn.asked_at_s)


async def _generate_offline(llm: Any, turns: list[TurnToMake]) -> None:
    """Let vLLM generate every turn at its recorded length, all requested at once."""
    from slipstream.actors.engine.orders import Generate
    from slipstream.actors.engine.vllm_start import sampling_params

    llm.reset_prefix_cache()
    for number, turn in enumerate(turns):
        sampling = Sampling(temperature=turn.temperature, top_p=1.0, top_k=0, max_turn_tokens=turn.num_tokens)
        order = Generate(call=number, tokens=turn.prompt, num_tokens=turn.num_tokens, sampling=sampling, seed=turn.seed)
        params = sampling_params(order, stop_token_ids=[], num_candidates=0)
        params.ignore_eos = True
        llm.add_request(str(number), {"type": "token", "prompt_token_ids": turn.prompt}, params)
    num_tokens = 0
    while llm.has_unfinished_requests():
        num_tokens += sum(len(output.outputs[0].token_ids) for output in llm.step())
    assert num_tokens == sum(turn.num_tokens for turn in turns), "vLLM ended a turn early"


if __name__ == "__main__":
    os.environ.update(vllm_environment())
    sys.exit(main())
