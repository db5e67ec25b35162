import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.objective.allocation import discounted, last_token, per_turn, uniform_positive

TURNS = st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 5)), min_size=1, max_size=6)
TWO_TURNS = np.array([1.0, -0.5]), np.array([2, 3])


def test_the_last_token_gets_the_whole_return() -> None:
    assert last_token(*TWO_TURNS).tolist() == [0, 0, 0, 0, 0.5]


def test_a_positive_return_is_spread_evenly_and_a_negative_one_is_not() -> None:
    assert uniform_positive(*TWO_TURNS) == pytest.approx([0.1] * 5)
    assert uniform_positive(np.array([-1.0, 0.5]), np.array([2, 3])).tolist() == [0, 0, 0, 0, -0.5]


def test_earlier_turns_get_a_discounted_part() -> None:
    # Parts 1/7, 2/7 and 4/7.
    assert discounted(np.array([0.0, 0.0, 7.0]), np.array([1, 2, 1]), discount=0.5) == pytest.approx([1, 0, 2, 4])


def test_each_turn_keeps_its_own_reward() -> None:
    assert per_turn(*TWO_TURNS).tolist() == [0, 1, 0, 0, -0.5]


@given(TURNS, st.floats(0.05, 1))
def test_every_allocation_conserves_the_return(turns: list[tuple[float, int]], discount: float) -> None:
    rewards, tokens = np.array([turn[0] for turn in turns]), np.array([turn[1] for turn in turns])
    for found in (
        last_token(rewards, tokens),
        uniform_positive(rewards, tokens),
        discounted(rewards, tokens, discount=discount),
        per_turn(rewards, tokens),
    ):
        assert len(found) == tokens.sum()
        assert found.sum() == pytest.approx(rewards.sum(), abs=1e-9)


@given(TURNS)
def test_per_turn_conserves_each_turns_reward_as_well(turns: list[tuple[float, int]]) -> None:
    rewards, tokens = np.array([turn[0] for turn in turns]), np.array([turn[1] for turn in turns])
    of_turns = np.split(per_turn(rewards, tokens), np.cumsum(tokens)[:-1])
    assert [float(of_turn.sum()) for of_turn in of_turns] == rewards.tolist()


@given(TURNS)
def test_without_discount_every_turn_gets_an_equal_part(turns: list[tuple[float, int]]) -> None:
    rewards, tokens = np.array([turn[0] for turn in turns]), np.array([turn[1] for turn in turns])
    ends = np.cumsum(tokens) - 1
    assert discounted(rewards, tokens, discount=1.0)[ends] == pytest.approx([rewards.sum() / len(turns)] * len(turns))
