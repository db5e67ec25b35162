import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.objective.kl import MAX_KL_WEIGHT, k3, reference_divergence
from tests.learner.policies import Tokens, any_batch, float64


@any_batch
def test_the_estimate_equals_a_derivation_from_probabilities(tokens: Tokens) -> None:
    probabilities = zip(tokens.current.exp().tolist(), tokens.behaviour.exp().tolist(), strict=True)
    expected = [now / then - 1 - math.log(now / then) for now, then in probabilities]
    found = k3(tokens.current, q_logprobs=tokens.behaviour).tolist()
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9) and min(found) >= -1e-12


# Logits of three policies; no ratio above 4.
WORDS = st.lists(st.tuples(*[st.floats(-0.34, 0.34)] * 3), min_size=2, max_size=6)


def expected(values: torch.Tensor, policy: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The gradient, to `logits`, of the mean of `values` over what `policy` samples."""
    return torch.autograd.grad((policy.detach() * values).sum(), logits, retain_graph=True)[0]


@given(WORDS, st.booleans())
def test_the_loss_has_the_value_and_the_gradient_of_the_divergence_for_any_sampler(
    words: list[tuple[float, float, float]], lagged: bool
) -> None:
    """By going through all words: no estimate is in it."""
    columns = [float64(*column) for column in zip(*words, strict=True)]
    logits = columns[0].requires_grad_()
    current, behaviour, reference = (column.log_softmax(dim=0) for column in columns)
    sampler = behaviour if lagged else current.detach()
    divergence = (current.exp() * (current - reference)).sum()
    (true,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    found = reference_divergence(current, behaviour_logprobs=sampler, reference_logprobs=reference)
    torch.testing.assert_close((sampler.exp() * found).sum(), divergence, rtol=0, atol=1e-9)
    exact = expected(found, sampler.exp(), logits)
    torch.testing.assert_close(exact, true, rtol=0, atol=1e-9)
    differentiated = (current - sampler).exp() * k3(reference, q_logprobs=current)  # the paper's form, by autograd
    torch.testing.assert_close(exact, expected(differentiated, sampler.exp(), logits), rtol=0, atol=1e-9)


def test_the_weight_is_bounded_and_a_far_reference_costs_no_digits() -> None:
    # Behaviour thought it nearly impossible, and the reference 3e8 times likelier than the current policy does.
    current = torch.tensor([-0.1, -20.0]).requires_grad_()
    values = reference_divergence(
        current, behaviour_logprobs=torch.tensor([-50.0, -20.0]), reference_logprobs=torch.tensor([-1.1, -0.5])
    )
    (slope,) = torch.autograd.grad(values.sum(), current)
    assert slope.tolist() == pytest.approx([MAX_KL_WEIGHT * 1.0, -19.5])
    assert bool(torch.isfinite(values).all())
