"""The kept set of a token is read from the engine's likeliest candidates, or the generation is refused."""

import numpy as np
import pytest

from slipstream.actors.engine.candidates import CandidatesCut, kept_of_candidates, num_candidates
from slipstream.common.records.kept_sets import kept_sets
from slipstream.common.records.trajectory import Sampling

OUT = -np.inf
CANDIDATES = np.array([[8, 2, 5, 4], [1, 7, 3, 9]], dtype=np.int32)


def logprobs(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def test_the_candidates_with_a_chance_are_the_kept_set() -> None:
    found = kept_of_candidates(CANDIDATES, logprobs([-0.1, -1, -3, OUT], [0.0, OUT, OUT, OUT]), vocab_size=10)
    assert found == kept_sets([[2, 5, 8], [1]])


def test_a_set_that_may_be_larger_than_what_was_asked_about_is_refused() -> None:
    full = logprobs([-1, -1, -1, -1], [0.0, OUT, OUT, OUT])
    with pytest.raises(CandidatesCut, match="a kept set has 4 tokens or more, and 4 were requested"):
        kept_of_candidates(CANDIDATES, full, vocab_size=10)
    whole = np.array([[3, 1, 0, 2], [1, 0, 3, 2]], dtype=np.int32)  # a vocabulary of four has no more
    assert kept_of_candidates(whole, full, vocab_size=4) == kept_sets([[0, 1, 2, 3], [1]])


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "expected"),
    [(1.0, 1.0, 0, 0), (1.0, 1.0, 4, 14), (1.0, 0.9, 20, 38), (0.7, 0.9, 256, 392), (0.0, 0.9, 20, 0)],
)
def test_half_as_many_again_as_top_k_are_asked_for(temperature: float, top_p: float, top_k: int, expected: int) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_turn_tokens=8)
    assert num_candidates(sampling, vocab_size=150_000) == expected
    assert num_candidates(sampling, vocab_size=12) == min(expected, 12)
