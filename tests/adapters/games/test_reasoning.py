"""reasoning-gym's data sets, really asked and scored: `make test-adapters` installs reasoning-gym and runs it."""

import asyncio
import builtins
import random
from collections.abc import Callable

import numpy as np
import pytest

from slipstream.envhub.adapters.reasoning import SCREENS
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import EnvError, Observation
from tests.adapters.held import ALWAYS, keeps
from tests.envhub import test_env_contract as contract
from tests.envhub.env_cases import Case, task_of

CASES = [
    Case(name="reasoning_gym", max_turns=1, noisy_success=1, options={"dataset": "chain_sum"}),
    Case(name="reasoning_gym", max_turns=1, noisy_success=1, options={"dataset": "pool_matrix"}),
]
CHECKS = [
    *ALWAYS,
    contract.test_train_and_held_out_tasks_share_no_text,
    contract.test_the_expert_solves_its_tasks,
    contract.test_step_after_the_end_is_an_error,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reasoning_gym_keeps_the_contract(case: Case, check: Callable[..., None]) -> None:
    keeps(check, case, splits=("train", "held_out"))


async def answered(dataset: str, answer: str | None) -> Observation:
    """What comes of `answer`; None for the expert's."""
    env = make_env("reasoning_gym", {"dataset": dataset})
    await env.reset(task_of("reasoning_gym"))
    return await env.step(env.expert() if answer is None else answer)


@pytest.mark.parametrize("dataset", ["basic_arithmetic", "countdown", "leg_counting", "n_queens", "spell_backward"])
def test_its_own_answers_score_one_and_others_next_to_nothing(dataset: str) -> None:
    right, wrong = asyncio.run(answered(dataset, None)), asyncio.run(answered(dataset, "purple"))
    assert (right.success, right.score, right.rewards, right.terminated) == (True, 1.0, {"solved": 1.0}, True)
    assert wrong.score < 0.1 and not wrong.success


def test_settings_reach_the_data_set() -> None:
    env = make_env("reasoning_gym", {"dataset": "chain_sum", "settings": {"min_terms": 6, "max_terms": 6}})
    opening = asyncio.run(env.reset(task_of("r"))).messages[0].content
    assert opening.count(" + ") + opening.count(" - ") == 5


async def test_an_empty_answer_is_none_and_the_question_stands() -> None:
    env = make_env("reasoning_gym", {})
    await env.reset(task_of("r"))
    empty, endless, right = [await env.step("  "), await env.step("9" * 5000), await env.step(env.expert())]
    assert (empty.valid_action, empty.done, endless.valid_action, right.success) == (False, False, False, True)


@pytest.mark.parametrize("dataset", sorted(SCREENS))
def test_no_answer_of_a_policy_is_ever_run(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(builtins, "canary", lambda: ran.append(dataset) or [], raising=False)
    for attack in ("canary()", "[canary()]", "[canary() for _ in '1']", "1+canary()", "9**9**9**9", "9* *9* *9**9"):
        assert asyncio.run(answered(dataset, attack)).score == 0.0
        assert ran == []


def test_an_answer_that_a_scorer_cannot_read_is_a_wrong_one(caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(answered("prime_factorization", "purple")).rewards == {"solved": 0.0}
    assert "the scorer of prime_factorization fails on an answer, which counts as wrong: ValueError" in caplog.text
    assert asyncio.run(answered("prime_factorization", None)).success


def test_what_is_no_number_is_no_answer_in_complex_numbers() -> None:
    assert [asyncio.run(answered("complex_arithmetic", said)).score for said in ("nan", "1e400")] == [0.0, 0.0]
    assert asyncio.run(answered("complex_arithmetic", None)).success


async def test_an_answer_in_numbers_reaches_the_scorer_of_countdown() -> None:
    env = make_env("reasoning_gym", {"dataset": "countdown"})
    await env.reset(task_of("r"))
    wrong = await env.step(f"({env.expert()}) + 0")
    assert wrong.score == 0.05  # it is no solution, as 0 was not given; only the scorer could tell


def test_what_cannot_be_asked_is_refused_when_it_is_made() -> None:
    for options, why in (
        ({"dataset": "simple_integration"}, "it evaluates the policy's answer as code"),
        ({"dataset": "puzzle24"}, "any numbers that make 24"),
        ({"dataset": "ransom_note"}, "differs between processes"),
        ({"dataset": "chain_summ"}, "did you mean chain_sum"),
        ({"dataset": "chain_sum", "settings": {"terms": 3}}, "do not fit chain_sum"),
        ({"dataset": "chain_sum", "settings": {"min_terms": 9, "max_terms": 2}}, "do not fit chain_sum"),
    ):
        with pytest.raises(ValueError, match=why):
            make_env("reasoning_gym", options)


def test_a_data_set_of_one_question_cannot_be_split() -> None:
    env = make_env("reasoning_gym", {"dataset": "count_primes", "settings": {"min_n": 1, "max_n": 1}})
    with pytest.raises(EnvError, match="too few questions"):
        for split in ("train", "held_out"):
            asyncio.run(env.reset(task_of("r", split=split)))


def test_the_process_own_generators_are_left_alone() -> None:
    """pool_matrix seeds numpy's own."""
    np.random.seed(7)
    random.seed(7)
    expected = random.random(), np.random.random()
    np.random.seed(7)
    random.seed(7)
    asyncio.run(answered("pool_matrix", "1"))
    assert (random.random(), np.random.random()) == expected
