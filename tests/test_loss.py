import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from common.config import ObjectiveConfig
from learner.loss import PolicyLoss, clipped_policy_loss, k3, outside, policy_loss, truncated_weight

LOGPROBS = st.floats(-8, -1e-3)
TOKENS = st.lists(st.tuples(LOGPROBS, LOGPROBS, st.floats(-3, 3)), min_size=1, max_size=12)

# Four tokens of behaviour probability 0.1, whose ratios are now 0.4, 1.5, 1.5 and 6.
CURRENT = [0.04, 0.15, 0.15, 0.6]
BEHAVIOUR = [0.1, 0.1, 0.1, 0.1]
ADVANTAGES = [1.0, 1.0, -1.0, 1.0]


def loss_and_gradient(
    correction: str, current: Tensor, behaviour: Tensor, advantages: Tensor
) -> tuple[PolicyLoss, Tensor]:
    current = current.clone().requires_grad_()
    loss = policy_loss(current, behaviour, advantages, objective=ObjectiveConfig(correction=correction))
    (gradient,) = torch.autograd.grad(loss.loss_sum, current)
    return dataclasses.replace(loss, loss_sum=loss.loss_sum.detach()), gradient


def four_tokens(correction: str) -> tuple[PolicyLoss, Tensor]:
    return loss_and_gradient(
        correction, torch.tensor(CURRENT).log(), torch.tensor(BEHAVIOUR).log(), torch.tensor(ADVANTAGES)
    )


def test_without_correction_the_loss_is_the_clipped_surrogate() -> None:
    loss, gradient = four_tokens("none")
    # -0.4, then 1.28 stops 1.5, then a negative advantage keeps 1.5 whole, then 1.28 stops 6.
    assert float(loss.loss_sum) == pytest.approx(-0.4 - 1.28 + 1.5 - 1.28, rel=1e-6)
    assert gradient.tolist() == pytest.approx([-0.4, 0.0, 1.5, 0.0], rel=1e-6)
    assert float(loss.num_masked) == 0


def test_the_token_mask_drops_far_tokens_from_the_sum_and_keeps_them_in_the_count() -> None:
    loss, gradient = four_tokens("token_mask")
    assert float(loss.loss_sum) == pytest.approx(-1.28 + 1.5, rel=1e-6)
    assert gradient.tolist() == pytest.approx([0.0, 0.0, 1.5, 0.0], rel=1e-6)
    assert float(loss.num_masked) == 2
    assert float(loss.num_loss_tokens) == 4


def test_truncated_importance_sampling_weights_each_token_up_to_the_cap() -> None:
    loss, gradient = four_tokens("truncated_is")
    assert float(loss.loss_sum) == pytest.approx(-0.4 - 1.5 + 1.5 - 2.0, rel=1e-6)
    assert gradient.tolist() == pytest.approx([-0.4, -1.5, 1.5, -2.0], rel=1e-6)


def test_measurements_are_taken_before_any_cut() -> None:
    loss, _ = four_tokens("token_mask")
    assert float(loss.ratio_sum) == pytest.approx(0.4 + 1.5 + 1.5 + 6, rel=1e-6)
    assert float(loss.ratio_square_sum) == pytest.approx(0.16 + 2.25 + 2.25 + 36, rel=1e-6)
    assert float(loss.ratio_max) == pytest.approx(6, rel=1e-6)
    assert float(loss.num_clipped_high) == 2
    assert float(loss.num_clipped_low) == 0
    # ratio - 1 - ln(ratio): 0.316291, twice 0.094535, 3.208241
    assert float(loss.mismatch_kl_sum) == pytest.approx(3.713601, rel=1e-5)


def test_a_fallen_ratio_with_negative_advantage_counts_as_clipped_low() -> None:
    loss, gradient = loss_and_gradient(
        "none", torch.tensor([math.log(0.05)]), torch.tensor([math.log(0.1)]), torch.tensor([-2.0])
    )
    assert float(loss.loss_sum) == pytest.approx(1.6)
    assert gradient.tolist() == [0.0]
    assert float(loss.num_clipped_low) == 1


def test_the_parts_agree_with_the_numbers_in_their_docstrings() -> None:
    ratios = torch.tensor([1.5, 1.5])
    losses = clipped_policy_loss(ratios, torch.tensor([2.0, -2.0]), clip_low=0.2, clip_high=0.28)
    assert losses.tolist() == pytest.approx([-2.56, 3.0])
    masked = outside(torch.tensor([0.4, 0.5, 1.0, 5.0, 6.0]), low=0.5, high=5.0)
    assert masked.tolist() == [True, False, False, False, True]
    assert truncated_weight(torch.tensor([0.5, 1.0, 3.0]), max_behaviour_weight=2.0).tolist() == [0.5, 1.0, 2.0]
    estimates = k3(torch.tensor([2.0, 0.5, 1.0]).log(), torch.zeros(3))
    assert estimates.tolist() == pytest.approx([0.306853, 0.193147, 0.0], abs=1e-6)


@given(TOKENS)
def test_at_zero_lag_every_correction_is_the_identity(tokens: list[tuple[float, float, float]]) -> None:
    behaviour = torch.tensor([token[1] for token in tokens], dtype=torch.float64)
    advantages = torch.tensor([token[2] for token in tokens], dtype=torch.float64)
    for correction in ("none", "token_mask", "truncated_is"):
        loss, gradient = loss_and_gradient(correction, behaviour, behaviour, advantages)
        assert float(loss.loss_sum) == pytest.approx(-float(advantages.sum()), abs=1e-12)
        assert gradient.tolist() == pytest.approx((-advantages).tolist(), abs=1e-12)
        assert float(loss.mismatch_kl_sum) == pytest.approx(0.0, abs=1e-12)


@given(TOKENS)
def test_losses_equal_a_derivation_by_cases(tokens: list[tuple[float, float, float]]) -> None:
    current, behaviour, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    clipped = masked = truncated = 0.0
    for now, then, advantage in tokens:
        ratio = math.exp(now) / math.exp(then)
        # PPO as OpenAI's Spinning Up writes it: an advantage is worth at most (1 + clip) of itself, a disadvantage at
        # least (1 - clip).
        worth = min(ratio, 1.28) * advantage if advantage >= 0 else max(ratio, 0.8) * advantage
        clipped -= worth
        masked -= worth if 0.5 <= ratio <= 5 else 0.0
        truncated -= min(ratio, 2.0) * advantage
    for correction, expected in (("none", clipped), ("token_mask", masked), ("truncated_is", truncated)):
        loss, _ = loss_and_gradient(correction, current, behaviour, advantages)
        assert float(loss.loss_sum) == pytest.approx(expected, rel=1e-12, abs=1e-9)


def test_a_token_of_vanishing_behaviour_probability_gives_no_nan() -> None:
    current, behaviour = torch.tensor([-0.1, -1.0]), torch.tensor([-200.0, -1.0])
    for correction in ("none", "token_mask", "truncated_is"):
        loss, gradient = loss_and_gradient(correction, current, behaviour, torch.tensor([-1.0, 1.0]))
        assert bool(torch.isfinite(loss.loss_sum))
        assert bool(torch.isfinite(gradient).all())
        assert gradient[1] == -1.0


def test_a_pack_without_loss_tokens_sums_to_zero() -> None:
    loss, _ = loss_and_gradient("token_mask", torch.zeros(0), torch.zeros(0), torch.zeros(0))
    assert float(loss.loss_sum) == 0
    assert float(loss.ratio_max) == 0
