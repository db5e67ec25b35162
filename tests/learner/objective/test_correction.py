"""Each correction against hand-computed numbers and a derivation by cases, and what all of them must leave alone."""

import dataclasses
import math

import pytest
import torch
from hypothesis import assume
from torch import Tensor

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.objective.correction import Correction, correction, outside, stale_negatives
from slipstream.learner.step.loss import policy_loss
from tests.learner.policies import Tokens, any_batch, float64, gradient, loss_tokens, of_lengths

CORRECTIONS = ("none", "token_mask")


def corrected(tokens: Tokens, **changes: object) -> Correction:
    return correction(tokens.read(), objective=ObjectiveConfig(**({"max_negative_kl": 0.0} | changes)))


@any_batch
def test_the_hard_cap_adds_its_tokens_to_those_a_correction_leaves_out_and_changes_nothing_else(tokens: Tokens) -> None:
    lags = torch.arange(len(tokens.current)) % 4
    old = lags > 2
    for name in CORRECTIONS:
        objective = ObjectiveConfig(correction=name, max_negative_kl=0.1)
        without = correction(tokens.read(), objective=objective)
        capped = correction(tokens.read(lags=lags), max_lag=2, objective=objective)
        assert torch.equal(capped.masked, without.masked | old)
        assert torch.equal(capped.weights, torch.where(old, 0.0, without.weights))


def test_the_parts_agree_with_the_numbers_in_their_docstrings() -> None:
    assert outside(float64(0.4, 0.5, 1, 5, 6), low=0.5, high=5.0).tolist() == [True, False, False, False, True]
    current, behaviour, negative = float64(0.8, 0.9, 0.8, 1.2).log(), float64(0, 0, 0, 0), float64(-1, -1, -1, -1)
    for advantages, expected in ((negative, [True, True, False, False]), (-negative, [False] * 4)):
        tokens = loss_tokens(current, behaviour, advantages, sequences=of_lengths(2, 2))
        assert stale_negatives(tokens, max_kl=0.1).tolist() == expected


def test_stale_negatives_are_masked_with_every_correction() -> None:
    tokens = Tokens(  # the second sequence has the negative advantages
        current=float64(0.08, 0.09, 0.08, 0.09).log(),
        behaviour=float64(0.1, 0.1, 0.1, 0.1).log(),
        advantages=float64(1, 1, -1, -1),
        sequences=of_lengths(2, 2),
    )
    for name in CORRECTIONS:
        masked = corrected(tokens, correction=name, max_negative_kl=0.1).masked
        assert masked.tolist() == [False, False, True, True]
        assert not corrected(tokens, correction=name, max_negative_kl=0.2).masked.any()


@any_batch
def test_corrections_equal_a_derivation_by_cases(tokens: Tokens) -> None:
    found = {name: corrected(tokens, correction=name) for name in CORRECTIONS}
    stale = stale_negatives(tokens.read(), max_kl=0.1)
    for members in tokens.members:
        now = [math.exp(tokens.current[i]) for i in members]
        then = [math.exp(tokens.behaviour[i]) for i in members]
        mean = (math.prod(now) / math.prod(then)) ** (1 / len(members))
        assume(abs(mean - math.exp(-0.1)) > 1e-9)
        for place, i in enumerate(members):
            one = now[place] / then[place]
            for name, value in {"none": 1.0, "token_mask": float(0.5 <= one <= 5)}.items():
                assert float(found[name].weights[i]) == pytest.approx(value, rel=1e-9), name
            assert bool(stale[i]) is (float(tokens.advantages[i]) < 0 and -math.log(mean) > 0.1)


def loss_and_gradient(tokens: Tokens, **changes: object) -> tuple[float, list[float]]:
    objective = ObjectiveConfig(**changes)

    def loss_of(at: Tensor) -> Tensor:
        return policy_loss(tokens.read(at), objective=objective).loss_sum

    return float(loss_of(tokens.current)), gradient(loss_of, tokens.current)


@any_batch
def test_at_zero_lag_every_correction_is_the_identity_under_every_surrogate(tokens: Tokens) -> None:
    fresh = dataclasses.replace(tokens, behaviour=tokens.current)
    for surrogate in ("ppo_clip", "gspo", "cispo", "dppo_tv"):
        plain = loss_and_gradient(fresh, surrogate=surrogate, correction="none", max_negative_kl=0.0)
        for name in CORRECTIONS:
            loss, slope = loss_and_gradient(fresh, surrogate=surrogate, correction=name, max_negative_kl=0.1)
            assert loss == pytest.approx(plain[0], abs=1e-12)
            assert slope == pytest.approx(plain[1], abs=1e-12)
