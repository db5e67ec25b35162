"""`make bench-envs`: environment steps per second with 64 concurrent episodes of each built-in environment.

They are compared with the same episodes played one at a time. An environment that waits for its sandbox gains from
concurrency; one that only computes must not lose by it.
"""

import asyncio
import gc
import random
import sys
import time
from collections.abc import Sequence

from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import ENVS, make_env
from slipstream.tools.lab.bench import benchmark
from slipstream.tools.lab.bench.benchmark import Row

NUM_EPISODES = 64
NUM_REPEATS = 3
NOISE = 0.2  # share of random admissible actions: a policy does not play like an expert
MAX_TURNS = 30


def main() -> int:
    """Measure, print, and write docs/benchmarks/envs.json; return 0."""
    measuring = benchmark.Run("envs")
    rows = [steps_row(name, num_episodes=NUM_EPISODES, num_repeats=NUM_REPEATS) for name in ENVS]
    return measuring.end(rows, versions={})


def steps_row(name: str, *, num_episodes: int, num_repeats: int) -> Row:
    """Steps per second of `num_episodes` concurrent episodes, against one at a time; the time includes resets."""
    pairs = []
    for repeat in range(num_repeats):
        tasks = [Task(env=name, split="train", index=repeat * num_episodes + i) for i in range(num_episodes)]
        pairs.append((steps_per_s(name, [[task] for task in tasks]), steps_per_s(name, [tasks])))
    return Row.of(
        f"{name}: {num_episodes} episodes at a time, beside one at a time",
        [together for together, _ in pairs],
        unit="steps/s",
        against=[alone for _, alone in pairs],
    )


def steps_per_s(name: str, lanes: Sequence[Sequence[Task]]) -> float:
    """Play the lanes concurrently, each in its own environment, and the episodes of a lane one after another."""
    gc.collect()
    started = time.perf_counter()
    num_steps = asyncio.run(_play_all(name, lanes))
    return num_steps / (time.perf_counter() - started)


async def _play_all(name: str, lanes: Sequence[Sequence[Task]]) -> int:
    return sum(await asyncio.gather(*(_play_lane(name, lane) for lane in lanes)))


async def _play_lane(name: str, lane: Sequence[Task]) -> int:
    env, num_steps = make_env(name, {}), 0
    for task in lane:
        chance = random.Random(task.index)
        observation = await env.reset(task)
        for _ in range(MAX_TURNS):
            actions = env.admissible()
            action = chance.choice(actions) if actions and chance.random() < NOISE else env.expert()
            observation = await env.step(action)
            num_steps += 1
            if observation.done:
                break
            await asyncio.sleep(0)  # a policy would generate here, while other episodes continue
    await env.close()
    return num_steps


if __name__ == "__main__":
    sys.exit(main())
