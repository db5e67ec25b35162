"""The critic's loss against hand-computed numbers and the published loop, and the unit that it predicts in."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.objective.return_scale import DECAY, MIN_STD, ReturnScale, scale_of
from learner.objective.value_loss import value_loss, value_metrics

NUMBER = st.floats(-5, 5, allow_subnormal=False)
TOKENS = st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=8)


def loss_of(values: list[float], old: list[float], returns: list[float], clip: float) -> tuple[float, list[float]]:
    """The sum and its gradient."""
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    found = value_loss(
        leaf, torch.tensor(old, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64), value_clip=clip
    )
    found.loss_sum.backward()
    assert leaf.grad is not None
    return float(found.loss_sum.detach()), leaf.grad.tolist()


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "gradient"),
    [
        (0.5, 0.0, 1.0, 0.2, 0.32, 0.0),  # clipped to 0.2: (0.2 - 1)^2 / 2
        (0.5, 0.0, 0.1, 0.2, 0.08, 0.4),  # the unclipped error is the larger one
        (0.5, 0.0, 1.0, 0.0, 0.125, -0.5),  # no clip
        (-0.5, 0.0, -1.0, 0.2, 0.32, 0.0),
        (0.1, 0.0, 1.0, 0.2, 0.405, -0.9),  # inside the clip
    ],
)
def test_the_larger_of_the_clipped_and_the_whole_error_counts(
    value: float, old: float, target: float, clip: float, loss: float, gradient: float
) -> None:
    found, slope = loss_of([value], [old], [target], clip)
    assert found == pytest.approx(loss)
    assert slope[0] == pytest.approx(gradient)


@given(TOKENS, st.floats(0.01, 2))
def test_the_loss_is_that_of_the_published_loops(tokens: list[tuple[float, float, float]], clip: float) -> None:
    """As TRL and verl have it: clamp, square both, and take half of the larger, token by token."""
    expected = 0.0
    for value, old, target in tokens:
        vpredclipped = min(max(value, old - clip), old + clip)
        expected += 0.5 * max((value - target) ** 2, (vpredclipped - target) ** 2)
    values, old, returns = (list(column) for column in zip(*tokens, strict=True))
    assert loss_of(values, old, returns, clip)[0] == pytest.approx(expected)


@given(TOKENS)
def test_a_clip_never_makes_the_loss_smaller_and_a_wide_one_does_nothing(
    tokens: list[tuple[float, float, float]],
) -> None:
    values, old, returns = (list(column) for column in zip(*tokens, strict=True))
    plain = loss_of(values, old, returns, 0.0)
    assert loss_of(values, old, returns, 0.3)[0] >= plain[0] - 1e-9
    wide = loss_of(values, old, returns, 20.0)
    assert wide[0] == pytest.approx(plain[0]) and wide[1] == pytest.approx(plain[1])


@pytest.mark.parametrize(
    ("expected", "explained"), [([1.0, 2.0], 0.75), ([1.0, 3.0], 1.0), ([2.0, 2.0], 0.0), ([3.0, 1.0], -3.0)]
)
def test_the_explained_variance_is_that_of_what_was_expected_before_the_step(
    expected: list[float], explained: float
) -> None:
    found = value_loss(torch.zeros(2), torch.tensor(expected), torch.tensor([1.0, 3.0]), value_clip=0.0)
    totals = {item.name: float(getattr(found, item.name)) for item in dataclasses.fields(found)}
    metrics = value_metrics(totals, grad_norm=2.0, lr=0.1)
    assert metrics.explained_variance == pytest.approx(explained)
    assert (metrics.loss, metrics.mean, metrics.return_mean, metrics.grad_norm, metrics.lr) == (2.5, 0, 2, 2, 0.1)


def test_the_first_step_sets_the_unit_and_later_ones_move_it_slowly() -> None:
    first = ReturnScale().after(np.array([1.0, 3.0]))
    assert (first.mean, first.std) == pytest.approx((2.0, 1.0))
    second = first.after(np.array([10.0, 10.0]))
    weights = DECAY * (1 - DECAY), 1 - DECAY  # of the first and of the second step
    mean = (weights[0] * 2 + weights[1] * 10) / sum(weights)
    square = (weights[0] * 5 + weights[1] * 100) / sum(weights)
    assert (second.mean, second.std) == pytest.approx((mean, math.sqrt(square - mean**2)))


def test_what_never_differs_and_what_was_never_seen_has_a_unit() -> None:
    assert (ReturnScale().mean, ReturnScale().std) == (0.0, 1.0)
    assert ReturnScale().after(np.array([2.0, 2.0])).std == MIN_STD


@given(st.lists(st.lists(NUMBER, min_size=1, max_size=5), min_size=1, max_size=5))
def test_the_unit_is_the_weighted_mean_over_steps_and_survives_a_checkpoint(steps: list[list[float]]) -> None:
    scale = ReturnScale()
    for returns in steps:
        scale = scale.after(np.array(returns))
    weights = [DECAY ** (len(steps) - 1 - number) for number in range(len(steps))]
    means = [sum(returns) / len(returns) for returns in steps]
    assert scale.mean == pytest.approx(float(np.average(means, weights=weights)), abs=1e-9)
    assert scale_of(scale.tensor()) == scale
    values = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    back = scale.normalised(torch.from_numpy(scale.restored(values.numpy())))
    assert back.tolist() == pytest.approx(values.tolist(), abs=1e-6)
