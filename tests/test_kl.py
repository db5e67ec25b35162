import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.objective.kl import k1, k2, k3
from tests.policies import Tokens, any_batch, float64


def test_the_estimates_agree_with_the_numbers_in_their_docstrings() -> None:
    ratios, nothing = float64(2, 0.5, 1).log(), torch.zeros(3, dtype=torch.float64)
    assert k1(ratios, nothing).tolist() == pytest.approx([-0.693147, 0.693147, 0], abs=1e-6)
    assert k2(ratios, nothing).tolist() == pytest.approx([0.240227, 0.240227, 0], abs=1e-6)
    assert k3(ratios, nothing).tolist() == pytest.approx([0.306853, 0.193147, 0], abs=1e-6)


@any_batch
def test_the_estimates_equal_a_derivation_from_probabilities(tokens: Tokens) -> None:
    for now, then, one, two, three in zip(
        tokens.current.exp().tolist(), tokens.behaviour.exp().tolist(), k1(tokens.current, tokens.behaviour),
        k2(tokens.current, tokens.behaviour), k3(tokens.current, tokens.behaviour), strict=True,
    ):  # fmt: skip
        assert float(one) == pytest.approx(math.log(then / now), abs=1e-9)
        assert float(two) == pytest.approx(math.log(then / now) ** 2 / 2, abs=1e-9)
        assert float(three) == pytest.approx(now / then - 1 - math.log(now / then), rel=1e-9, abs=1e-9)
        assert float(two) >= 0 and float(three) >= -1e-12


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.05, 1), st.floats(0.05, 1)), min_size=2, max_size=6))
def test_k1_and_k3_are_the_divergence_on_average_over_what_q_samples(weights: list[tuple[float, float]]) -> None:
    p, q = (float64(*column) / sum(column) for column in zip(*weights, strict=True))
    divergence = sum(b * math.log(b / a) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert float((q * k1(p.log(), q.log())).sum()) == pytest.approx(divergence, abs=1e-9)
    assert float((q * k3(p.log(), q.log())).sum()) == pytest.approx(divergence, abs=1e-9)


def test_as_a_loss_k2_has_the_gradient_of_the_divergence_and_k3_that_of_the_reverse_one() -> None:
    reference = float64(0.2, 0.3, 0.5)
    logits = float64(0.3, -0.2, 0.1).requires_grad_()
    logprobs = logits.log_softmax(dim=0)
    sampled = logprobs.detach().exp()  # what the current policy samples, as weights of an expectation

    def slope(value: torch.Tensor) -> list[float]:
        return [float(each) for each in torch.autograd.grad(value, logits, retain_graph=True)[0]]

    divergence = (logprobs.exp() * (logprobs - reference.log())).sum()
    reverse = (reference * (reference.log() - logprobs)).sum()
    assert slope((sampled * k2(reference.log(), logprobs)).sum()) == pytest.approx(slope(divergence))
    assert slope((sampled * k3(reference.log(), logprobs)).sum()) == pytest.approx(slope(reverse))
