"""Lag across learners that came back: by hand, and against a count of the steps one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.records.versions import Resumption, lags, oldest_within

# A checkpoint at 5 while 9 was on offer; later one at 11, of which nothing newer was published.
TWICE = [Resumption(checkpoint_version=5, first_version=10), Resumption(checkpoint_version=11, first_version=12)]


def lag_of(version: int, *, policy_version: int, resumptions: list[Resumption]) -> int:
    return int(lags(np.array([version], np.int32), policy_version=policy_version, resumptions=resumptions)[0])


def test_without_a_resumption_lag_is_the_difference_of_the_versions() -> None:
    assert lags(np.array([7, 3, 0], np.int32), policy_version=7, resumptions=[]).tolist() == [0, 4, 7]
    assert oldest_within(4, policy_version=7, resumptions=[]) == 3


@pytest.mark.parametrize(("version", "lag"), [(13, 0), (12, 1), (11, 1), (10, 2), (7, 2), (5, 2), (4, 3), (0, 7)])
def test_the_versions_that_a_resumption_skips_are_no_lag(version: int, lag: int) -> None:
    assert lag_of(version, policy_version=13, resumptions=TWICE) == lag


@pytest.mark.parametrize(("max_lag", "oldest"), [(0, 13), (1, 11), (2, 5), (3, 4), (9, -2)])
def test_the_oldest_version_within_a_lag_lies_before_what_was_skipped(max_lag: int, oldest: int) -> None:
    assert oldest_within(max_lag, policy_version=13, resumptions=TWICE) == oldest


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, list[Resumption]]:
    """The newest version of a run, and how its learner came back again and again."""
    resumptions: list[Resumption] = []
    first = newest = draw(st.integers(0, 5))
    for _ in range(draw(st.integers(0, 4))):
        checkpoint = draw(st.integers(first if resumptions else 0, newest))
        first = newest + draw(st.integers(1, 6))
        resumptions.append(Resumption(checkpoint_version=checkpoint, first_version=first))
        newest = first + draw(st.integers(0, 5))
    return newest, resumptions


@given(lives(), st.integers(0, 12))
def test_lag_counts_the_steps_that_the_learner_has_behind_it(life: tuple[int, list[Resumption]], max_lag: int) -> None:
    newest, resumptions = life
    steps = [0]
    for version in range(1, newest + 1):
        lost = any(each.checkpoint_version < version <= each.first_version for each in resumptions)
        steps.append(steps[-1] + (not lost))
    expected = [steps[newest] - behind for behind in steps]
    found = lags(np.arange(newest + 1, dtype=np.int32), policy_version=newest, resumptions=resumptions)
    assert found.tolist() == expected
    within = [version for version, lag in enumerate(expected) if lag <= max_lag]
    assert max(0, oldest_within(max_lag, policy_version=newest, resumptions=resumptions)) == within[0]
