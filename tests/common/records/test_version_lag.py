"""Lag across learners that came back, against a count of the steps one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.records.version_lag import Resumption, lags, oldest_within


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
