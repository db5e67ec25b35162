"""The number of candidate tokens to request from vLLM for each sampled token, and the kept sets among them.

vLLM returns its own sampling masks (`return_sampling_mask`) on GPUs only. On every device, its processed
log-probabilities are -inf for tokens that top-k and top-p exclude. So the kept set is computed from enough of the most
likely tokens: those whose log-probability is finite.
"""

import numpy as np
from jaxtyping import Float, Int

from slipstream.common.records.kept_sets import MAX_KEPT_TOKENS, KeptSets
from slipstream.common.records.trajectory import Sampling


class CandidatesCut(ValueError):
    """A kept set may have more tokens than were requested."""


def num_candidates(sampling: Sampling, *, vocab_size: int) -> int:
    """How many of the most likely tokens to request; 0 if `sampling` excludes no tokens.

    Top-k keeps every token that ties with the k-th, and bfloat16 logits tie often. So it is 1.5 times top_k, and 8
    more.
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
    """The kept set of each token (a row): its `candidates` with a finite log-probability. Raises CandidatesCut."""
    possible = logprobs > -np.inf
    counts, width = possible.sum(axis=1), candidates.shape[1]
    if counts.max() == width < vocab_size:
        raise CandidatesCut(
            f"a kept set has {width} tokens or more, and {width} were requested: too many tokens tie with the last one "
            "that `sampling.top_k` keeps; set another `sampling.top_k`, or a lower `sampling.top_p`"
        )
    impossible_last = np.sort(np.where(possible, candidates, np.iinfo(np.int32).max), axis=1)
    ids = impossible_last[np.arange(width) < counts[:, None]]
    return KeptSets(counts=counts.astype("<u2").tobytes(), ids=ids.astype("<i4").tobytes())
