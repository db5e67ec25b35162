import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.advantage import centred_advantages, returns_differ, standardised_advantages

RETURNS = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=16)


def test_centred_advantages_are_returns_above_the_mean() -> None:
    assert centred_advantages([3.0, 0.0, 0.0, 1.0]).tolist() == [2.0, -1.0, -1.0, 0.0]


def test_standardised_advantages_divide_by_the_sample_standard_deviation() -> None:
    # Mean 1, squares of the differences 4 + 1 + 1 + 0 = 6, over n - 1 = 3: the standard deviation is sqrt(2).
    expected = [2 / math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2), 0.0]
    assert standardised_advantages([3.0, 0.0, 0.0, 1.0]) == pytest.approx(expected, rel=2e-6)


def test_equal_returns_that_differ_by_rounding_give_no_advantage() -> None:
    assert np.abs(standardised_advantages([0.1 + 0.2, 0.3, 0.3])).max() < 1e-9
    assert not returns_differ([0.1 + 0.2, 0.3, 0.3])
    assert returns_differ([0.0, 0.001])


@given(RETURNS)
def test_advantages_of_a_group_sum_to_zero(returns: list[float]) -> None:
    assert centred_advantages(returns).sum() == pytest.approx(0.0, abs=1e-9)
    assert standardised_advantages(returns).sum() == pytest.approx(0.0, abs=1e-6)


@given(RETURNS, st.floats(-50, 50))
def test_a_reward_that_all_members_get_changes_nothing(returns: list[float], bonus: float) -> None:
    with_bonus = centred_advantages([value + bonus for value in returns])
    assert with_bonus == pytest.approx(centred_advantages(returns), abs=1e-9)


def test_a_group_of_one_and_a_return_that_is_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 returns"):
        centred_advantages([1.0])
    with pytest.raises(ValueError, match="must be finite"):
        standardised_advantages([1.0, float("nan")])
