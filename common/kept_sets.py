"""The kept sets of sampled tokens: the tokens that top-k and top-p kept, over which the policy's softmax ran.

Without them a log-probability that is comparable to the recorded one cannot be computed: the set depends on all logits
of the policy that sampled, and another policy, or the same one with other arithmetic, keeps another set.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

MAX_TOP_K = 256  # `sampling.top_k`; a set costs 4 bytes a token
MAX_KEPT_TOKENS = 2 * MAX_TOP_K  # of one set: top-k keeps every token that ties with the k-th


class KeptSets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One set for each sampled token, in order: 2 bytes each, and 4 bytes for each token in it."""

    counts: bytes  # uint16: the number of tokens in each set
    ids: bytes  # int32: one set after another, each ascending

    def count_array(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.counts, dtype="<u2").astype(np.int64)

    def id_array(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.ids, dtype="<i4")

    def between(self, start: int, stop: int) -> "KeptSets":
        """The sets of the sampled tokens [start, stop)."""
        counts = self.count_array()
        first, last = int(counts[:start].sum()), int(counts[:stop].sum())
        return KeptSets(counts=self.counts[2 * start : 2 * stop], ids=self.ids[4 * first : 4 * last])

    def contradiction(self, sampled: npt.NDArray[np.int32], *, vocab_size: int) -> str:
        """What is wrong with these sets for the tokens `sampled`; "" if they are valid."""
        if len(self.counts) != 2 * len(sampled):
            return f"{len(self.counts) / 2:g} kept sets for {len(sampled)} sampled tokens"
        counts = self.count_array()
        if counts.min() < 1 or counts.max() > MAX_KEPT_TOKENS:
            return f"kept sets of {counts.min()} to {counts.max()} tokens, expected 1 to {MAX_KEPT_TOKENS}"
        if len(self.ids) != 4 * counts.sum():
            return f"kept sets of {counts.sum()} tokens in all, in {len(self.ids)} bytes"
        ids = self.id_array()
        if ids.view("<u4").max() >= vocab_size:
            return f"kept token ids in [{ids.min()}, {ids.max()}], vocabulary is [0, {vocab_size})"
        owners = np.repeat(np.arange(len(counts)), counts)
        if np.any((np.diff(ids) <= 0) & (np.diff(owners) == 0)):
            return "a kept set is not in ascending order"
        if np.count_nonzero(ids == sampled[owners]) != len(sampled):  # at most one hit in a set, as no set repeats ids
            return "a sampled token is not in its kept set"
        return ""


def kept_sets(sets: Sequence[Sequence[int]]) -> KeptSets:
    """Pack `sets`, one for each sampled token."""
    return KeptSets(
        counts=np.array([len(each) for each in sets], dtype="<u2").tobytes(),
        ids=np.array([token for each in sets for token in sorted(each)], dtype="<i4").tobytes(),
    )


def joined(parts: Sequence[KeptSets]) -> KeptSets:
    """The sets of all `parts` as one, in order."""
    return KeptSets(counts=b"".join(part.counts for part in parts), ids=b"".join(part.ids for part in parts))
