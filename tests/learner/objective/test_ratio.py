import math

import pytest
import torch

from slipstream.learner.batch.pack import pack
from slipstream.learner.objective.ratio import geometric_ratio, ratio
from tests.learner.policies import Tokens, any_batch, float64, of_lengths
from tests.tools.run.tiny_model import random_sequence


def test_sums_and_means_are_those_of_the_tokens_own_sequence() -> None:
    sequences, values = of_lengths(2, 0, 1), float64(1, 3, 5)
    assert sequences.sums(values).tolist() == [4, 4, 5]
    assert sequences.means(values).tolist() == [2, 2, 5]


@any_batch
def test_sequence_ratios_equal_a_derivation_by_probabilities(tokens: Tokens) -> None:
    means = geometric_ratio(tokens.current, other_logprobs=tokens.behaviour, sequences=tokens.sequences)
    for members in tokens.members:
        product = 1.0
        for index in members:
            product *= math.exp(tokens.current[index]) / math.exp(tokens.behaviour[index])
        for index in members:
            assert float(means[index]) == pytest.approx(product ** (1 / len(members)), rel=1e-9)


def test_a_ratio_beyond_all_bounds_is_finite_with_its_square() -> None:
    far, zero = torch.tensor([200.0]), torch.tensor([0.0])
    for found in (ratio(far, other_logprobs=zero), geometric_ratio(far, other_logprobs=zero, sequences=of_lengths(1))):
        assert bool(torch.isfinite(found.square()).all())


def test_a_pack_knows_the_sequence_of_each_loss_token() -> None:
    packed = pack([random_sequence(4, seed=0, prompt=2), random_sequence(5, seed=1), random_sequence(3, seed=2)])
    assert packed.lengths == (5, 4, 3)
    assert packed.loss_sequences.ids.tolist() == [0, 0, 1, 1]
    assert packed.loss_sequences.num == 3
