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


def test_gae_by_hand() -> None:
    # Deltas 0.1, 0.2, 0.2; with lam 0.5 the advantages are 0.1 + 0.3 / 2, 0.2 + 0.2 / 2 and 0.2.
    found = gae(np.array([0.0, 0.0, 1.0]), values=np.array([0.5, 0.6, 0.8]), gamma=1.0, lam=0.5)
    assert found == pytest.approx([0.25, 0.3, 0.2])


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


def test_bi_level_gae_by_hand() -> None:
    # Turns of 2 and 1 tokens, values at their ends 0.5 and 0.8. Turn deltas 0 + 0.8 - 0.5 = 0.3 and 1 - 0.8 = 0.2, so
    # the turns' advantages are 0.3 + 0.5 * 0.2 = 0.4 and 0.2; in front of the first stands 0.5 - 0.4 + 0.5 * 0.4 = 0.3.
    found = bi_level_gae(
        np.array([0.0, 1.0]),
        np.array([0.4, 0.5, 0.8]),
        np.array([2, 1]),
        turn_gamma=1.0,
        token_gamma=1.0,
        lam=0.5,
    )
    assert found == pytest.approx([0.3, 0.4, 0.2])


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


def test_vtrace_by_hand() -> None:
    # Ratios 0.5 and 3, cut to 0.5 and 1. Last token: 0.6 + (1 - 0.6) = 1; first: 0.5 + 0.5 * 0.1 + 0.5 * (1 - 0.6).
    found = vtrace(np.array([0.0, 1.0]), values=np.array([0.5, 0.6]), lagged_ratio=np.array([0.5, 3.0]), gamma=1.0)
    assert found.targets == pytest.approx([0.75, 1.0])
    assert found.advantages == pytest.approx([0.25, 0.4])


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
    assert found.targets == pytest.approx(targets, abs=1e-9)
    for token, after in enumerate([*targets[1:], 0.0]):
        expected = min(float(ratios[token]), 1.0) * (rewards[token] + gamma * after - values[token])
        assert found.advantages[token] == pytest.approx(expected, abs=1e-9)
