"""Plays your environment without a model: `pytest test_NAME.py`."""

import asyncio

from slipstream import Observation, Task
from slipstream.tools.init.env_starter import MyEnv


async def played(*, index: int, by_expert: bool) -> Observation:
    env = MyEnv()
    seen = await env.reset(Task(env="NAME", split="train", index=index))
    for _ in range(100):
        if seen.terminated:
            break
        seen = await env.step(env.expert() if by_expert else "nonsense")
    await env.close()
    return seen


def test_the_expert_solves_every_task() -> None:
    ends = [asyncio.run(played(index=index, by_expert=True)) for index in range(20)]
    assert all(end.success and end.score == 1 for end in ends)


def test_nonsense_is_invalid_and_earns_nothing() -> None:
    end = asyncio.run(played(index=0, by_expert=False))
    assert not end.valid_action and not end.success and end.score == 0
