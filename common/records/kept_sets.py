"""The kept sets of sampled tokens: those that could be sampled, over which the policy's softmax ran.

Top-k and top-p keep a set of every token; `sampling.max_thought_tokens` has one for each token of a mark that closes a
thought. Without them a log-probability that is comparable to the recorded one cannot be computed. The set of top-k and
top-p depends on all logits of the policy that sampled, and another policy, or the same one with other arithmetic, keeps
another set.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

MAX_TOP_K = 256  # `sampling.top_k`; a set costs 4 bytes a token
MAX_KEPT_TOKENS = 2 * MAX_TOP_K  # of one set: top-k keeps every token that ties with the k-th


class KeptSets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One set for each sampled token, in order: 2 bytes each, and 4 bytes for each token in it."""

    counts: bytes  # uint16: the number of tokens in each set; 0 where the whole vocabulary could be sampled
    ids: bytes  # int32: one set after another, each ascending

    def count_array(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.counts, dtype="<u2").astype(np.int64)

    def id_array(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.ids, dtype="<i4")

    @property
    def mean_size(self) -> float:
        """The mean number of tokens in a set; tokens from the whole vocabulary have none."""
        counts = self.count_array()
        return float(counts.sum()) / max(1, int(np.count_nonzero(counts)))

    def between(self, start: int, stop: int) -> "KeptSets":
        """The sets of the sampled tokens [start, stop)."""
        counts = self.count_array()
        first, last = int(counts[:start].sum()), int(counts[:stop].sum())
        return KeptSets(counts=self.counts[2 * start : 2 * stop], ids=self.ids[4 * first : 4 * last])

    def contradiction(self, sampled: npt.NDArray[np.int32], *, vocab_size: int, least: int) -> str:
        """What is wrong with these sets of `least` tokens or more for the tokens `sampled`; "" if they are valid."""
        if len(self.counts) != 2 * len(sampled):
            return f"{len(self.counts) / 2:g} kept sets for {len(sampled)} sampled tokens"
        counts = self.count_array()
        if counts.min() < least or counts.max() > MAX_KEPT_TOKENS:
            return f"kept sets of {counts.min()} to {counts.max()} tokens, expected {least} to {MAX_KEPT_TOKENS}"
        if len(self.ids) != 4 * counts.sum():
            return f"kept sets of {counts.sum()} tokens in all, in {len(self.ids)} bytes"
        ids = self.id_array()
        if ids.view("<u4").max(initial=0) >= vocab_size:
            return f"kept token ids in [{ids.min()}, {ids.max()}], vocabulary is [0, {vocab_size})"
        owners = np.repeat(np.arange(len(counts)), counts)
        if np.any((np.diff(ids) <= 0) & (np.diff(owners) == 0)):
            return "a kept set is not in ascending order"
        # At most one hit in a set, as no set repeats ids.
        if np.count_nonzero(ids == sampled[owners]) != np.count_nonzero(counts):
            return "a sampled token is not in its kept set"
        return ""


def kept_sets(sets: Sequence[Sequence[int]]) -> KeptSets:
    """Pack `sets`, one for each sampled token."""
    return KeptSets(
        counts=np.array([len(each) for each in sets], dtype="<u2").tobytes(),
        ids=np.array([token for each in sets for token in sorted(each)], dtype="<i4").tobytes(),
    )


def no_sets(num_tokens: int) -> KeptSets:
    """Those of tokens that were sampled from the whole vocabulary."""
    return KeptSets(counts=bytes(2 * num_tokens), ids=b"")


def joined(parts: Sequence[KeptSets]) -> KeptSets:
    """The sets of all `parts` as one, in order."""
    return KeptSets(counts=b"".join(part.counts for part in parts), ids=b"".join(part.ids for part in parts))
