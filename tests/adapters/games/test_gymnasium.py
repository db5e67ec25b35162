"""Gymnasium's own environments, played in words: `make test-adapters` installs Gymnasium and runs it."""

import asyncio
import random
import threading
from collections.abc import Callable

import pytest

from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import EnvError, Observation
from tests.adapters.held import USUAL, acted
from tests.envhub import test_env_contract as contract
from tests.envhub.env_cases import Case, rollout, task_of

CART = "tests.adapters.cart:SPEECH"
CASES = [
    Case(name="gymnasium", max_turns=200, noisy_success=0, options={"settings": {"is_slippery": False}}),
    Case(name="gymnasium", max_turns=300, noisy_success=0, options={"game": "FrozenLake8x8-v1"}),
    Case(name="gymnasium", max_turns=400, noisy_success=0.9, options={"game": "Taxi-v4"}),
    Case(name="gymnasium", max_turns=400, noisy_success=0.9, options={"game": "CliffWalking-v1"}),
    Case(name="gymnasium", max_turns=30, noisy_success=0, options={"game": "Blackjack-v1"}),
    Case(name="gymnasium", max_turns=600, noisy_success=0, options={"game": "CartPole-v1", "speech": CART}),
]
CHECKS = [
    *USUAL,
    contract.test_every_admissible_action_is_understood,
    contract.test_a_random_policy_never_breaks_it_and_every_turn_says_what_it_earned,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gymnasium_keeps_the_contract(case: Case, check: Callable[[Case], None]) -> None:
    if check.__name__.startswith("test_garbage") and "Blackjack" in str(case):
        pytest.skip("a state of it has no key")
    check(case)


@pytest.mark.parametrize("number", [0, 2, 3, 5])
def test_the_experts_of_what_is_no_game_of_chance_solve_it(number: int) -> None:
    case = CASES[number]
    env, rng = case.make(), random.Random(0)
    ends = [asyncio.run(rollout(env, case, case.task("train", index), rng, noise=0))[-1] for index in range(20)]
    assert all(end.success and end.score == 1.0 for end in ends)


@pytest.mark.parametrize(("number", "at_least"), [(1, 0.6), (4, 0.35)])
def test_the_experts_of_games_of_chance_do_well(number: int, at_least: float) -> None:
    case = CASES[number]
    env, rng = case.make(), random.Random(0)
    ends = [asyncio.run(rollout(env, case, case.task("train", index), rng, noise=0))[-1] for index in range(100)]
    assert at_least < sum(end.score for end in ends) / 100 < 0.99


def played(game: str, actions: list[str], **options: object) -> list[Observation]:
    return acted("gymnasium", {"game": game, **options}, 0, actions)


def test_a_lake_reads_as_it_lies_and_words_are_free_in_case_and_space() -> None:
    observations = played("FrozenLake-v1", [" Right ", "fly", "DOWN"], settings={"is_slippery": False})
    lake = "SFFF\nFHFH\nFFFH\nHFFG"
    assert [message.role for message in observations[0].messages] == ["system", "user"]
    assert observations[0].messages[1].content == "P" + lake[1:]
    assert observations[1].messages[0].content == "SPFF\n" + lake[5:]
    assert observations[2].messages[0].content == "no such action\nSPFF\n" + lake[5:]
    assert (observations[2].valid_action, observations[2].rewards) == (False, {"gym": 0.0})
    end = observations[3]
    assert end.messages[0].content == "SFFF\nFPFH\nFFFH\nHFFG\nyou fell into a hole"
    assert (end.terminated, end.truncated, end.score, end.success) == (True, False, 0.0, False)


def test_a_time_limit_truncates_and_is_no_success() -> None:
    end = played("CliffWalking-v1", ["left"] * 7, settings={"max_episode_steps": 7})[-1]
    assert (end.terminated, end.truncated, end.score) == (False, True, 0.0)
    assert end.rewards == {"gym": -1.0}


def test_the_taxi_lists_only_what_moves_it() -> None:
    env = make_env("gymnasium", {"game": "Taxi-v4"})
    opening = asyncio.run(env.reset(task_of("gymnasium")))
    for action in env.admissible() or []:
        asyncio.run(env.reset(task_of("gymnasium")))
        assert asyncio.run(env.step(action)).messages[0] != opening.messages[1]


def test_what_cannot_be_played_is_refused_when_it_is_made() -> None:
    for options, why in (
        ({"game": "FrozenPond-v1"}, "must be an environment that Gymnasium knows"),
        ({"game": "no_such_module:Pond-v0"}, "must be an environment that Gymnasium knows"),
        ({"game": "CartPole-v1"}, "`env.options.speech` must name"),
        ({"game": "CartPole-v1", "speech": "cart"}, "must be module:NAME"),
        ({"game": "CartPole-v1", "speech": "no_such_module:SPEECH"}, "is its folder on PYTHONPATH"),
        ({"game": "CartPole-v1", "speech": "tests.adapters.cart:NO_SPEECH"}, "must be a Speech, got str"),
    ):
        with pytest.raises(ValueError, match=why):
            make_env("gymnasium", options)


async def test_its_thread_ends_with_it() -> None:
    env, before = make_env("gymnasium", {}), set(threading.enumerate())
    await env.reset(task_of("gymnasium"))
    mine = set(threading.enumerate()) - before
    assert [thread.name for thread in mine] == ["gymnasium FrozenLake-v1"]
    await env.close()
    for thread in mine:
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()
    with pytest.raises(EnvError, match="call reset first"):
        await env.step("left")
