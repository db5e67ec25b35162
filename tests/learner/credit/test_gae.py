"""GAE, bi-level GAE and V-trace, against the explicit sums that their recursions stand for."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.credit.gae import bi_level_gae, gae
from slipstream.learner.credit.vtrace import vtrace

NUMBER = st.floats(-3, 3)
STEPS = st.lists(st.tuples(NUMBER, NUMBER, st.floats(0.05, 4)), min_size=1, max_size=8)
FRACTION = st.floats(0, 1)


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
