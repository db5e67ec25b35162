"""What a screen costs, gains and does to the gradient, by counting every outcome of a small group."""

import itertools
import math

import numpy as np
import pytest

from slipstream.learner.objective.advantage import leave_one_out_advantages, standardised_advantages
from slipstream.tools.lab.study.screen import (
    CHANCES,
    binomial,
    chances_of,
    episodes_played,
    signal,
    teaching,
    with_known_chances,
)


def at(chance: float) -> int:
    return int(np.abs(CHANCES - chance).argmin())


def test_costs_and_chances_are_those_of_every_outcome_counted() -> None:
    for chance, size, screen in ((0.5, 4, 2), (0.9, 5, 3), (0.1, 4, 0)):
        row = at(chance)
        p, expected, played = float(CHANCES[row]), np.zeros(size + 1), 0.0
        for outcome in itertools.product((0, 1), repeat=size):
            probability = math.prod(p if won else 1 - p for won in outcome)
            passes = len(set(outcome[: screen or size])) > 1
            expected[sum(outcome)] += probability * passes
            played += probability * (size if passes or not screen else screen)
        assert teaching(size, screen)[row] == pytest.approx(expected)
        assert episodes_played(size, screen)[row] == pytest.approx(played)


def test_among_equal_tasks_no_screen_gains_anything_and_a_larger_group_gains_its_baseline() -> None:
    for chance in (0.2, 0.5, 0.95):
        alone = np.zeros(len(CHANCES))
        alone[at(chance)] = 1
        assert signal(alone, 16, 0, own=0.0) / signal(alone, 8, 0, own=0.0) == pytest.approx((15 / 16) / (7 / 8))
        for screen in range(2, 8):
            assert signal(alone, 8, screen, own=0.0) < signal(alone, 8, 0, own=0.0)


def test_among_unequal_tasks_a_screen_gains_and_known_chances_are_the_bound() -> None:
    """Half of the tasks are nearly always solved; the others half of the time."""
    weights = np.zeros(len(CHANCES))
    weights[[at(0.5), -1]] = 0.5
    plain, screened = (signal(weights, 16, screen, own=0.0) for screen in (0, 4))
    assert (
        1.4 < screened / plain < 1.6
    )  # at best 16 of 16 + 4 episodes are of the tasks that teach, instead of 16 of 32
    assert screened < with_known_chances(weights, 4, 16)


def test_where_tasks_pull_apart_more_tasks_are_worth_more_than_larger_groups() -> None:
    """At p = 1/2, A of a pair is 0 or 1/2, each half of the time."""
    alone = np.zeros(len(CHANCES))
    alone[at(0.5)] = 1
    p = float(CHANCES[at(0.5)])
    first, second = p * (1 - p), p * (1 - p) / 2  # E[A] = 2 p (1 - p) / 2, E[A^2] = 2 p (1 - p) / 4
    assert signal(alone, 2, 0, own=0.25) == pytest.approx(first**2 / (0.25 * second + first) / 2)
    assert signal(alone, 4, 0, own=2.0) > signal(alone, 16, 0, own=2.0)
    assert signal(alone, 4, 0, own=0.0) < signal(alone, 16, 0, own=0.0)


def test_the_chances_are_found_again_from_the_groups_that_they_give() -> None:
    truth = np.zeros(len(CHANCES))
    truth[[at(0.3), at(0.98)]] = 0.4, 0.6
    found = chances_of(1000 * truth @ binomial(8))
    assert found[CHANCES < 0.6].sum() == pytest.approx(0.4, abs=0.02)
    assert found @ CHANCES == pytest.approx(truth @ CHANCES, abs=1e-3)


def expected_gradient(values: list[float], logits: list[float], *, size: int, screen: int, advantages_of) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Of the logits of a policy that does one action, which earns its value: the mean over every outcome of a group."""
    chances = np.exp(logits) / np.exp(logits).sum()
    scores = np.eye(len(values)) - chances
    total = np.zeros(len(values))
    for actions in itertools.product(range(len(values)), repeat=size):
        returns = [values[action] for action in actions]
        if len(set(returns[: screen or size])) > 1:
            total += math.prod(chances[list(actions)]) * (advantages_of(returns) @ scores[list(actions)])
    return total


def policy_gradient(values: list[float], logits: list[float]) -> np.ndarray:
    chances = np.exp(logits) / np.exp(logits).sum()
    return chances * (np.array(values) - chances @ values)


def test_with_two_returns_a_screen_changes_the_length_of_a_tasks_gradient_and_not_its_direction() -> None:
    values, logits = [1.0, 1.0, 0.0, 0.0], [0.7, -0.2, 0.1, 0.4]
    wanted = policy_gradient(values, logits)
    for advantages_of in (leave_one_out_advantages, standardised_advantages):
        found = expected_gradient(values, logits, size=5, screen=2, advantages_of=advantages_of)
        assert found / np.linalg.norm(found) == pytest.approx(wanted / np.linalg.norm(wanted), abs=1e-6)


def test_with_more_returns_a_frequent_one_of_the_screen_counts_for_less() -> None:
    """E[sum A score] = sum over v of (v - J) grad p_v (n - (n - m) sum_u p_u^m - m (n - m) / (n - 1) p_v^(m - 1))."""
    values, logits, size, screen = [0.0, 0.75, 1.0], [0.0, 0.0, 1.5], 5, 3
    chances = np.exp(logits) / np.exp(logits).sum()
    slopes = np.diag(chances) - np.outer(chances, chances)  # of each value's chance, by the logits
    factors = size - (size - screen) * (chances**screen).sum()
    factors = factors - screen * (size - screen) / (size - 1) * chances ** (screen - 1)
    predicted = ((np.array(values) - chances @ values) * factors) @ slopes
    found = expected_gradient(values, logits, size=size, screen=screen, advantages_of=leave_one_out_advantages)
    assert found == pytest.approx(predicted, abs=1e-9)
    wanted = policy_gradient(values, logits)
    cosine = found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted)
    assert 0.98 < cosine < 0.9999  # another direction, by a few degrees


def test_members_outside_the_screen_alone_keep_the_direction_with_any_returns() -> None:
    values, logits = [0.0, 0.75, 1.0], [0.0, 0.0, 1.5]

    def of_others(returns: list[float]) -> np.ndarray:
        return leave_one_out_advantages(returns) * (np.arange(5) >= 3)

    found = expected_gradient(values, logits, size=5, screen=3, advantages_of=of_others)
    chances = np.exp(logits) / np.exp(logits).sum()
    assert found == pytest.approx(2 * (1 - (chances**3).sum()) * policy_gradient(values, logits), abs=1e-9)
