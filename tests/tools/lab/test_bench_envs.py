"""The benchmark of environments plays what it counts."""

import asyncio

from slipstream.common.records.trajectory import Task
from slipstream.tools.lab.bench.envs import _play_all, steps_row


def test_lanes_play_the_same_steps_as_one_after_the_other() -> None:
    tasks = [Task(env="kg", split="train", index=index) for index in range(6)]
    together = asyncio.run(_play_all("kg", [[task] for task in tasks]))
    alone = asyncio.run(_play_all("kg", [tasks]))
    assert together == alone > 6


def test_a_row_holds_steps_a_second_of_both() -> None:
    row = steps_row("craft", num_episodes=3, num_repeats=2)
    assert (row.num_repeats, row.unit) == (2, "steps/s")
    assert row.value > 0 and row.against > 0
