"""Measures the pause of a commit against the time of a token, on a real engine that keeps generating."""

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file

from slipstream.actors.engine.vllm_engine import VllmEngine
from slipstream.common.config.config import Config, load_config
from slipstream.common.records.trajectory import Sampling
from slipstream.learner.publisher.publish import Publisher
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.tools.lab.bench.benchmark import Row
from slipstream.tools.lab.bench.load.an_engine import TIMEOUT_S, an_engine
from slipstream.tools.lab.bench.weights_stage import Bench, Tensors, offered, publish_whole
from slipstream.tools.run.prepare import model_folder, prepare

CONFIG = Path(__file__).parents[3] / "conf" / "quickstart.yaml"
NUM_RUNNING = 16  # concurrent generations during a refresh
NUM_REFRESHES = 15
POLL_S = 0.1


def refresh() -> Row:
    """The pause of a commit during NUM_RUNNING generations, against the time between two of their tokens."""
    with tempfile.TemporaryDirectory(prefix="bench-refresh-") as root:
        config = load_config(str(CONFIG), [f"run.root={root}", "run.name=bench-refresh", "warm_start.episodes=0"])
        folder = model_folder(config, prepare(config))
        with an_engine(config, folder, Path(root)) as (connections, engine, settings):
            weights = list(load_file(folder / "model.safetensors").items())
            bench = Bench(redis_url=settings.receiver.redis_url, root=Path(root))
            with bench.publishing(config.run.name, weights, learner_epoch=connections.epoch) as publisher:
                refreshed = _refreshed(config, weights, connections.bulletin, engine, publisher)
                pauses_s, token_times_s = asyncio.run(refreshed)
    return Row.of(
        "refresh: how long a commit pauses generation, in token times",
        [1e3 * pause_s for pause_s in pauses_s],
        unit="ms",
        against=[1e3 * token_time_s for token_time_s in token_times_s],
        goal="ratio <= 2",
    )


async def _refreshed(
    config: Config, weights: Tensors, bulletin: Bulletin, engine: VllmEngine, publisher: Publisher
) -> tuple[list[float], list[float]]:
    """The pause of each commit, and the time of a token before it, both in seconds."""
    fresh_times_s: list[float] = []  # of generations since the last refresh that no refresh interrupted
    pauses_s, token_times_s, seeds = [], [], itertools.count()
    lanes = [
        asyncio.create_task(_generate_on(engine, config.model.max_tokens, fresh_times_s, seeds))
        for _ in range(NUM_RUNNING)
    ]
    async with asyncio.timeout(TIMEOUT_S):
        for version in range(1, NUM_REFRESHES + 1):
            fresh_times_s.clear()
            while len(fresh_times_s) < NUM_RUNNING:  # noqa: ASYNC110 - the lanes fill it
                await asyncio.sleep(POLL_S)
            token_times_s.append(statistics.median(fresh_times_s))
            publish_whole(publisher, weights, policy_version=version)
            await engine.stage(await asyncio.to_thread(offered, bulletin, version))
            pauses_s.append(await engine.commit(version))
    for lane in lanes:
        lane.cancel()
    await asyncio.gather(*lanes, return_exceptions=True)
    return pauses_s, token_times_s


async def _generate_on(engine: VllmEngine, max_tokens: int, token_times_s: list[float], seeds: Iterator[int]) -> None:
    """Generate again and again, each time as long as the context allows; append the time of a token."""
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=max_tokens)
    while True:
        seed = next(seeds)
        started = time.perf_counter()
        completion = await engine.generate([5 + seed % 50] * 32, sampling, seed=seed)
        if len(completion.version_spans) == 1:
            token_times_s.append((time.perf_counter() - started) / len(completion.tokens))
