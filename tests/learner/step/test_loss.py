"""The composition: what `policy_loss` makes of its parts, and what it measures on the way."""

import dataclasses
import math
from itertools import product

import pytest
import torch
from hypothesis import assume
from torch import Tensor

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.step.loss import PolicyLoss, policy_loss
from tests.learner.policies import Tokens, any_batch, float64, gradient, loss_tokens, of_lengths, slopes

# Four tokens, each a sequence, of behaviour probability 0.1, whose ratios are now 0.4, 1.5, 1.5 and 6.
CURRENT = torch.tensor([0.04, 0.15, 0.15, 0.6])
BEHAVIOUR = torch.tensor([0.1, 0.1, 0.1, 0.1])
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, 1.0])


def loss_and_gradient(
    current: Tensor, behaviour: Tensor, advantages: Tensor, lengths: tuple[int, ...] | None = None, **changes: object
) -> tuple[PolicyLoss, Tensor]:
    """Each token is a sequence of its own where no lengths are given."""
    current = current.clone().requires_grad_()
    sequences = of_lengths(*(lengths if lengths is not None else [1] * len(advantages)))
    tokens = loss_tokens(current, behaviour, advantages, sequences=sequences)
    loss = policy_loss(tokens, objective=ObjectiveConfig(**changes))
    (slope,) = torch.autograd.grad(loss.loss_sum, current)
    return dataclasses.replace(loss, loss_sum=loss.loss_sum.detach()), slope


@pytest.mark.parametrize(
    ("correction", "total", "slopes", "num_masked"),
    [
        # -0.4, then 1.28 stops 1.5, then a negative advantage keeps 1.5 whole, then 1.28 stops 6.
        ("none", -0.4 - 1.28 + 1.5 - 1.28, [-0.4, 0.0, 1.5, 0.0], 0),
        # Far tokens are no longer in the sum, but in the count.
        ("token_mask", -1.28 + 1.5, [0.0, 0.0, 1.5, 0.0], 2),
    ],
)
def test_four_tokens_have_these_losses_and_are_measured_before_any_cut(
    correction: str, total: float, slopes: list[float], num_masked: int
) -> None:
    loss, gradient = loss_and_gradient(CURRENT.log(), BEHAVIOUR.log(), ADVANTAGES, correction=correction)
    assert float(loss.loss_sum) == pytest.approx(total, rel=1e-6)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-6)
    assert (float(loss.num_masked), float(loss.num_loss_tokens)) == (num_masked, 4)
    assert float(loss.ratio_sum) == pytest.approx(0.4 + 1.5 + 1.5 + 6, rel=1e-6)
    assert float(loss.ratio_square_sum) == pytest.approx(0.16 + 2.25 + 2.25 + 36, rel=1e-6)
    assert float(loss.ratio_max) == pytest.approx(6, rel=1e-6)
    # ratio - 1 - ln(ratio): 0.316291, twice 0.094535, 3.208241
    assert float(loss.mismatch_kl_sum) == pytest.approx(3.713601, rel=1e-5)
    assert (float(loss.num_clipped_high), float(loss.num_clipped_low)) == (2, 0)


def test_a_fallen_ratio_with_negative_advantage_counts_as_clipped_low() -> None:
    current, behaviour = torch.tensor([0.05]).log(), torch.tensor([0.1]).log()
    loss, slope = loss_and_gradient(current, behaviour, torch.tensor([-2.0]), correction="none", max_negative_kl=0.0)
    assert float(loss.loss_sum) == pytest.approx(1.6)
    assert slope.tolist() == [0.0]
    assert float(loss.num_clipped_low) == 1


def test_a_sequence_that_keeps_a_token_is_not_counted_as_masked() -> None:
    behaviour = torch.full((4,), -2.0)
    current = behaviour + torch.tensor([0.4, 1.0, 0.4, 6.0]).log()
    loss, _ = loss_and_gradient(current, behaviour, torch.ones(4), (2, 2))
    assert (float(loss.num_masked), float(loss.num_masked_sequences)) == (3, 1)


def test_entropy_is_subtracted_by_its_bonus_from_every_loss_token_masked_or_not() -> None:
    entropies = float64(1.0, 3.0)

    def loss_of(entropies: Tensor) -> Tensor:
        others = {"sequences": of_lengths(2), "entropies": entropies}
        tokens = loss_tokens(float64(-9.0, -1.0), float64(-1.0, -1.0), float64(1, 1), **others)
        return policy_loss(tokens, objective=ObjectiveConfig(entropy_bonus=0.01)).loss_sum

    assert float(loss_of(entropies)) == pytest.approx(-1 - 0.01 * 4)
    assert gradient(loss_of, entropies) == pytest.approx([-0.01, -0.01])


@any_batch
def test_the_divergence_from_the_reference_is_added_by_its_coefficient_for_tokens_masked_or_not(tokens: Tokens) -> None:
    reference, objective = tokens.behaviour.flip(0), ObjectiveConfig(kl_coefficient=0.1)  # any other policy

    def added(at: Tensor) -> Tensor:
        """What a reference adds to the loss."""
        with_one, without = (
            policy_loss(tokens.read(at, reference_logprobs=anchor), objective=objective).loss_sum
            for anchor in (reference, None)
        )
        return with_one - without

    weights = [min(math.exp(float(c - b)), 5) for c, b in zip(tokens.current, tokens.behaviour, strict=True)]
    log_ratios = [float(r - c) for r, c in zip(reference, tokens.current, strict=True)]
    each = [w * (math.exp(x) - 1 - x) for w, x in zip(weights, log_ratios, strict=True)]
    assert float(added(tokens.current)) == pytest.approx(0.1 * sum(each), rel=1e-9, abs=1e-9)
    slope = [-0.1 * w * x for w, x in zip(weights, log_ratios, strict=True)]
    assert gradient(added, tokens.current) == pytest.approx(slope, rel=1e-9, abs=1e-9)


@any_batch
def test_losses_equal_a_derivation_by_cases(tokens: Tokens) -> None:
    clipped = masked = capped = by_sequence = 0.0
    columns = (tokens.current, tokens.behaviour, tokens.advantages)
    for members in tokens.members:
        for index in members:
            now, then, advantage = (float(column[index]) for column in columns)
            ratio = math.exp(now) / math.exp(then)
            # PPO as OpenAI's Spinning Up writes it: an advantage is worth at most (1 + clip) of itself, a disadvantage
            # at least (1 - clip).
            worth = min(ratio, 1.28) * advantage if advantage >= 0 else max(ratio, 0.8) * advantage
            clipped -= worth
            by_sequence -= worth / len(members)
            masked -= worth if 0.5 <= ratio <= 5 else 0.0
            capped -= min(ratio, 2.0) * advantage * now
    lengths = tuple(len(members) for members in tokens.members)
    for changes, expected in (
        ({"correction": "none"}, clipped),
        ({"correction": "none", "normalisation": "sequences"}, by_sequence),
        ({"correction": "token_mask"}, masked),
        ({"surrogate": "cispo", "correction": "none", "ratio_high": 2.0}, capped),
    ):
        loss, _ = loss_and_gradient(*columns, lengths, max_negative_kl=0.0, **changes)
        assert float(loss.loss_sum) == pytest.approx(expected, rel=1e-12, abs=1e-9)


@any_batch
def test_the_gradient_of_the_default_is_that_of_differences(tokens: Tokens) -> None:
    ratios = (tokens.current - tokens.behaviour).exp()
    means = tokens.sequences.means(tokens.behaviour - tokens.current)
    # Differences across a kink are no derivative.
    assume(all(float((ratios - kink).abs().min()) > 1e-4 for kink in (0.5, 0.8, 1.28, 5.0)))
    assume(float((means - 0.1).abs().min()) > 1e-4)

    def loss_of(at: Tensor) -> Tensor:
        return policy_loss(tokens.read(at), objective=ObjectiveConfig()).loss_sum

    assert gradient(loss_of, tokens.current) == pytest.approx(slopes(loss_of, tokens.current), rel=1e-5, abs=1e-6)


def test_a_token_of_vanishing_behaviour_probability_gives_no_nan() -> None:
    current, behaviour = torch.tensor([-0.1, -1.0]), torch.tensor([-200.0, -1.0])
    advantages = torch.tensor([-1.0, 1.0])
    for surrogate, correction in product(("ppo_clip", "gspo", "cispo", "dppo_tv"), ("none", "token_mask")):
        loss, slope = loss_and_gradient(current, behaviour, advantages, surrogate=surrogate, correction=correction)
        assert bool(torch.isfinite(loss.loss_sum)) and bool(torch.isfinite(slope).all()), (surrogate, correction)
        assert slope[1] == -1.0, (surrogate, correction)


def test_a_pack_without_loss_tokens_sums_to_zero() -> None:
    loss, _ = loss_and_gradient(torch.zeros(0), torch.zeros(0), torch.zeros(0), (0,))
    assert (float(loss.loss_sum), float(loss.ratio_max), float(loss.num_masked_sequences)) == (0, 0, 0)
