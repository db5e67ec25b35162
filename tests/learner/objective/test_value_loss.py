"""The critic's loss against hand-computed numbers and the published loop, and the unit that it predicts in."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.objective.return_scale import DECAY, MIN_STD, ReturnScale, scale_of
from slipstream.learner.objective.value_loss import value_loss, value_metrics


def test_the_loss_is_half_the_squared_error_and_its_gradient_the_error() -> None:
    values = torch.tensor([0.5, -0.5, 2.0], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    found = value_loss(values, old_values=torch.zeros(3, dtype=torch.float64), returns=returns)
    found.loss_sum.backward()
    assert float(found.loss_sum.detach()) == pytest.approx(0.125 + 0.125)
    assert values.grad is not None and values.grad.tolist() == [-0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("expected", "explained"), [([1.0, 2.0], 0.75), ([1.0, 3.0], 1.0), ([2.0, 2.0], 0.0), ([3.0, 1.0], -3.0)]
)
def test_the_explained_variance_is_of_what_was_expected_before_a_step(expected: list[float], explained: float) -> None:
    found = value_loss(torch.zeros(2), old_values=torch.tensor(expected), returns=torch.tensor([1.0, 3.0]))
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


@given(st.lists(st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=1, max_size=5), min_size=1, max_size=5))
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
