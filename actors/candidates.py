"""Which tokens an engine is asked about beside the sampled one, and the kept set that its answer holds.

vLLM's own sampling masks (`return_sampling_mask`) come from its GPU model runner alone. Its processed log-probabilities
are -inf for what top-k and top-p cut off, on every machine: of enough of the likeliest tokens, the others are the set.
"""

import numpy as np
from jaxtyping import Float, Int

from common.kept_sets import MAX_KEPT_TOKENS, KeptSets
from common.trajectory import Sampling


class CandidatesCut(ValueError):
    """A kept set may have more tokens than were asked about."""


def num_candidates(sampling: Sampling, *, vocab_size: int) -> int:
    """How many of the likeliest tokens to ask about; 0 where `sampling` cuts nothing off.

    All that tie with the k-th are kept, and bfloat16 logits tie often: hence half as many again, and 8.
    """
    if not sampling.is_cut:
        return 0
    return min(sampling.top_k + sampling.top_k // 2 + 8, MAX_KEPT_TOKENS, vocab_size)


def kept_of_candidates(
    candidates: Int[np.ndarray, "tokens candidates"],
    logprobs: Float[np.ndarray, "tokens candidates"],
    *,
    vocab_size: int,
) -> KeptSets:
    """Of each sampled token, a row, those of its likeliest `candidates` that had a chance. Raises CandidatesCut."""
    possible = logprobs > -np.inf
    counts, width = possible.sum(axis=1), candidates.shape[1]
    if counts.max() == width < vocab_size:
        raise CandidatesCut(
            f"a kept set has {width} tokens or more, as many as were asked about: too many tie with the last that "
            "`sampling.top_k` keeps; choose another, or a `sampling.top_p` that ends before"
        )
    impossible_last = np.sort(np.where(possible, candidates, np.iinfo(np.int32).max), axis=1)
    ids = impossible_last[np.arange(width) < counts[:, None]]
    return KeptSets(counts=counts.astype("<u2").tobytes(), ids=ids.astype("<i4").tobytes())
