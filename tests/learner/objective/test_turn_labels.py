"""The loss of a process reward model against hand-computed numbers and PyTorch's own, and what its values give."""

import numpy as np
import pytest
import torch

from slipstream.learner.objective.turn_labels import (
    Bin,
    calibration,
    calibration_error,
    probability,
    progress,
    turn_loss,
    turn_slope,
)


def test_pytorch_finds_the_same_loss_and_slope() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(0, 4, 50), rng.random(50)
    theirs = torch.tensor(scores).requires_grad_(True)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(theirs, torch.tensor(labels), reduction="none")
    loss.sum().backward()
    assert turn_loss(scores, labels) == pytest.approx(loss.detach().numpy(), rel=1e-9)
    assert turn_slope(scores, labels) == pytest.approx(-theirs.grad.numpy(), rel=1e-9)


def test_scores_far_out_overflow_nowhere() -> None:
    scores = np.array([-1e4, 1e4])
    assert probability(scores).tolist() == [0, 1]
    assert turn_loss(scores, np.array([1.0, 1.0])).tolist() == [1e4, 0]


def test_progress_adds_up_to_the_last_probability() -> None:
    assert progress(np.array([0.5, 0.25, 1.0])).tolist() == [0.5, -0.25, 0.75]
    found = np.random.default_rng(1).random(9)
    assert progress(found).sum() == pytest.approx(found[-1])


def test_the_calibration_is_that_counted_by_hand() -> None:
    bins = calibration(np.array([0.05, 0.625, 0.6875, 1.0]), np.array([0.0, 1.0, 0.5, 1.0]))
    assert bins == [
        Bin(low=0.0, high=0.1, turns=1, mean_probability=0.05, mean_label=0.0),
        Bin(low=0.6, high=0.7, turns=2, mean_probability=0.65625, mean_label=0.75),
        Bin(low=0.9, high=1.0, turns=1, mean_probability=1.0, mean_label=1.0),
    ]
    assert calibration_error(bins) == pytest.approx((0.05 + 2 * 0.09375 + 0) / 4)
