"""What of the contract somebody else's environment can be held to: checks of tests/envhub/test_env_contract.py."""

import asyncio
from collections.abc import Callable
from typing import Any

from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Observation
from tests.envhub import test_env_contract as contract
from tests.envhub.env_cases import Case

# What makes no sense leaves no trace, the expert plays well, and so on, are up to who wrote the environment.
ALWAYS: tuple[Callable[[Case], None], ...] = (
    contract.test_the_same_task_and_actions_give_the_same_episode_on_every_instance,
    contract.test_reset_leaves_nothing_of_the_episode_before,
    contract.test_a_step_before_reset_and_an_unknown_split_are_refused,
    contract.test_a_restored_snapshot_goes_on_as_the_original,
    contract.test_bytes_that_are_no_snapshot_are_refused_and_change_nothing,
    contract.test_no_action_takes_long_to_read,
    contract.test_a_slow_answer_is_cut_at_the_step_timeout,
    contract.test_close_may_be_called_twice_and_a_closed_one_starts_again,
)
# And what nearly every one keeps.
USUAL = (
    *ALWAYS,
    contract.test_step_after_the_end_is_an_error,
    contract.test_garbage_is_an_observation_and_leaves_the_state_alone,
)


def keeps(check: Callable[..., None], case: Case, *, splits: tuple[str, ...] = ("train",)) -> None:
    """Run a check of the contract; the expert's for each of `splits`."""
    if check is contract.test_the_expert_solves_its_tasks:
        for split in splits:
            check(case, split)
    else:
        check(case)


def acted(name: str, options: dict[str, Any], index: int, actions: list[str]) -> list[Observation]:
    """The opening of a task of the train split, and the answers to these actions."""

    async def play() -> list[Observation]:
        env = make_env(name, options)
        try:
            opening = await env.reset(Task(env=name, split="train", index=index))
            return [opening, *[await env.step(action) for action in actions]]
        finally:
            await env.close()

    return asyncio.run(play())
