"""Advantages against their definitions: of groups, and GAE and V-trace against the sums of their recursions."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.credit import grpo
from slipstream.learner.credit.gae import bi_level_gae, gae
from slipstream.learner.credit.gigpo import gigpo_advantages
from slipstream.learner.credit.reinforce_pp import standardised_over_batch
from slipstream.learner.credit.token_rewards import returns_to_go
from slipstream.learner.credit.vtrace import vtrace

NUMBER, FRACTION = st.floats(-3, 3), st.floats(0, 1)
STEPS = st.lists(st.tuples(NUMBER, NUMBER, st.floats(0.05, 4)), min_size=1, max_size=8)
TURNS = st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.floats(-5, 5)), min_size=1, max_size=6)
RETURNS = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=16)


def test_equal_returns_that_differ_by_rounding_give_no_advantage() -> None:
    assert np.abs(grpo.standardised_advantages([0.1 + 0.2, 0.3, 0.3])).max() < 1e-9
    assert not grpo.returns_differ([0.1 + 0.2, 0.3, 0.3])
    assert grpo.returns_differ([0.0, 0.001])


def test_a_group_of_one_and_a_return_that_is_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 returns"):
        grpo.centred_advantages([1.0])
    with pytest.raises(ValueError, match="must be finite"):
        grpo.standardised_advantages([1.0, float("nan")])


@given(RETURNS)
def test_leave_one_out_equals_its_definition_and_sums_to_zero(returns: list[float]) -> None:
    found = grpo.leave_one_out_advantages(returns)
    for member, advantage in enumerate(found):
        others = returns[:member] + returns[member + 1 :]
        assert advantage == pytest.approx(returns[member] - statistics.fmean(others), abs=1e-9)
    assert found.sum() == pytest.approx(0.0, abs=1e-8)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.floats(0.1, 1))
def test_returns_to_go_equal_the_discounted_sums(rewards: list[float], gamma: float) -> None:
    found = returns_to_go(np.array(rewards), gamma=gamma)
    for step in range(len(rewards)):
        expected = math.fsum(gamma**away * reward for away, reward in enumerate(rewards[step:]))
        assert found[step] == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30))
def test_what_is_standardised_over_a_batch_has_no_mean_and_a_deviation_of_one(returns: list[float]) -> None:
    found = np.concatenate(standardised_over_batch([np.array(returns[:1]), np.array(returns[1:])]))
    deviation = statistics.pstdev(returns)
    expected = [(value - statistics.fmean(returns)) / (deviation + 1e-6) for value in returns]
    assert found == pytest.approx(expected, abs=1e-6)
    assert found.sum() == pytest.approx(0.0, abs=1e-6)


@given(st.lists(TURNS, min_size=2, max_size=5), st.floats(0.1, 1))
def test_gigpo_equals_its_definition_turn_by_turn(members: list[list[tuple[str, float]]], gamma: float) -> None:
    """As verl-agent goes about it: every turn is a row of its own, and finds by itself with whom it is compared."""
    rewards = [np.array([reward for _, reward in member]) for member in members]
    keys = [[key for key, _ in member] for member in members]
    found = gigpo_advantages(rewards, keys, gamma=gamma, compared=grpo.standardised_advantages)
    totals = [math.fsum(reward for _, reward in member) for member in members]
    rows = [
        (number, key, math.fsum(gamma**away * reward for away, (_, reward) in enumerate(member[turn:])))
        for number, member in enumerate(members)
        for turn, (key, _) in enumerate(member)
    ]
    for (number, key, to_go), advantage in zip(rows, np.concatenate(found), strict=True):
        expected = (totals[number] - statistics.fmean(totals)) / (statistics.stdev(totals) + 1e-6)
        same = [other_to_go for _, other_key, other_to_go in rows if other_key == key]
        if key and len(same) > 1:
            expected += (to_go - statistics.fmean(same)) / (statistics.stdev(same) + 1e-6)
        assert advantage == pytest.approx(expected, abs=1e-6)
    assert [len(each) for each in found] == [len(member) for member in members]


def columns(steps: list[tuple[float, float, float]]) -> list[np.ndarray]:
    return [np.array(column, dtype=np.float64) for column in zip(*steps, strict=True)]


def temporal_differences(rewards: np.ndarray, values: np.ndarray, gamma: float) -> list[float]:
    following = [*values[1:].tolist(), 0.0]
    return [float(r + gamma * after - v) for r, v, after in zip(rewards, values, following, strict=True)]


@given(STEPS, FRACTION, FRACTION)
def test_gae_equals_the_weighted_sum_of_temporal_differences(
    steps: list[tuple[float, float, float]], gamma: float, lam: float
) -> None:
    rewards, values, _ = columns(steps)
    deltas = temporal_differences(rewards, values, gamma)
    found = gae(rewards, values=values, gamma=gamma, lam=lam)
    for token in range(len(deltas)):
        expected = math.fsum((gamma * lam) ** away * delta for away, delta in enumerate(deltas[token:]))
        assert found[token] == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.tuples(NUMBER, st.lists(NUMBER, min_size=1, max_size=4)), min_size=1, max_size=4), FRACTION)
def test_bi_level_gae_equals_explicit_sums_inside_each_turn(turns: list[tuple[float, list[float]]], lam: float) -> None:
    rewards = np.array([reward for reward, _ in turns])
    values = np.array([value for _, inside in turns for value in inside])
    tokens = np.array([len(inside) for _, inside in turns])
    found = bi_level_gae(rewards, values, tokens, turn_gamma=0.9, token_gamma=0.95, lam=lam)
    ends = [inside[-1] for _, inside in turns]
    turn_deltas = temporal_differences(rewards, np.array(ends), 0.9)
    place = 0
    for turn, (_, inside) in enumerate(turns):
        of_turn = math.fsum((0.9 * lam) ** away * delta for away, delta in enumerate(turn_deltas[turn:]))
        # Inside a turn nothing is earned before its end, which earns the turn's advantage above its own value.
        deltas = [0.95 * after - value for value, after in itertools.pairwise(inside)] + [of_turn]
        for token in range(len(inside)):
            expected = math.fsum((0.95 * lam) ** away * delta for away, delta in enumerate(deltas[token:]))
            assert found[place] == pytest.approx(expected, abs=1e-9)
            place += 1


@given(STEPS, FRACTION)
def test_vtrace_equals_the_papers_sum(steps: list[tuple[float, float, float]], gamma: float) -> None:
    rewards, values, ratios = columns(steps)
    found = vtrace(rewards, values=values, lagged_ratio=ratios, gamma=gamma)
    deltas = temporal_differences(rewards, values, gamma)
    targets = []
    for start in range(len(rewards)):
        target, traces = float(values[start]), 1.0
        for away, token in enumerate(range(start, len(rewards))):
            target += gamma**away * traces * min(float(ratios[token]), 1.0) * deltas[token]
            traces *= min(float(ratios[token]), 1.0)
        targets.append(target)
    assert found.returns == pytest.approx(targets, abs=1e-9)
    for token, after in enumerate([*targets[1:], 0.0]):
        expected = min(float(ratios[token]), 1.0) * (rewards[token] + gamma * after - values[token])
        assert found.advantages[token] == pytest.approx(expected, abs=1e-9)
