"""What a pair teaches, against literals and against autograd."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.objective.preference import dpo_margins, preference_loss, preference_slope


def test_literals() -> None:
    margins = np.array([0.0, 2.0, -2.0, 800.0, -800.0])
    expected = [math.log(2), 0.126928, 2.126928, 0.0, 800.0]
    assert preference_loss(margins).tolist() == pytest.approx(expected, abs=1e-6)
    assert preference_slope(margins).tolist() == pytest.approx([0.5, 0.119203, 0.880797, 0.0, 1.0], abs=1e-6)


@given(st.floats(-50, 50), st.floats(0.01, 2))
def test_the_slope_is_what_autograd_finds_in_the_loss_of_the_paper(difference: float, beta: float) -> None:
    """Equation 7 of https://arxiv.org/abs/2305.18290, by torch: its derivative by the log-probability of each side."""
    sides = torch.tensor([difference, 0.0], dtype=torch.float64, requires_grad=True)
    loss = -torch.nn.functional.logsigmoid(beta * ((sides[0] - sides[1]) - 0.7))
    loss.backward()
    margins = dpo_margins(np.array([difference]), reference=np.array([0.7]), beta=beta)
    assert preference_loss(margins)[0] == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
    slope = beta * preference_slope(margins)[0]
    assert (-slope, slope) == pytest.approx(tuple(sides.grad.tolist()), rel=1e-9, abs=1e-12)
