"""Answers that reasoning-gym's scorers do not get, and data sets that are refused; without the package."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from slipstream.common.records.trajectory import Task
from slipstream.envhub.adapters.reasoning import REFUSED, SCREENS, ReasoningEnv, _Episode


@pytest.mark.parametrize("dataset", [*REFUSED])
def test_a_data_set_that_is_refused_says_why(dataset: str) -> None:
    with pytest.raises(ValueError, match=f"{dataset} is not supported: "):
        ReasoningEnv(dataset=dataset)


def test_data_sets_that_any_answer_solves_are_refused() -> None:
    assert {"game_of_life_halting", "puzzle24"} <= REFUSED.keys()
    assert not REFUSED.keys() & SCREENS.keys()


def test_an_answer_in_complex_numbers_is_written_in_digits() -> None:
    written = ["3 - 2i", "-1.5+2j", "(4+0j)"]
    others = ["nan", "nan+1j", "inf", "1e400", "9" * 400]
    assert [answer for answer in (*written, *others) if SCREENS["complex_arithmetic"].fullmatch(answer)] == written


@pytest.mark.parametrize("scored", [lambda _: 1 / 0, float], ids=["raises", "nan"])
def test_a_scorer_that_fails_on_an_answer_or_gives_no_number_scores_0(scored: Callable[[str], float]) -> None:
    env = ReasoningEnv.__new__(ReasoningEnv)
    env._dataset = "any"
    data = SimpleNamespace(score_answer=lambda answer, entry: scored(answer))
    task = Task(env="reasoning_gym", split="train", index=0)
    assert env._score(_Episode(task=task, data=data, entry={"answer": "1"}), "nan") == 0.0
