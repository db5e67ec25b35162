"""Kept sets are recorded compactly, cut and joined without loss, and refused where they cannot be true."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.records.kept_sets import MAX_KEPT_TOKENS, KeptSets, joined, kept_sets, no_sets

SETS = [[3], [2, 9, 5], [7, 1]]
SAMPLED = np.array([3, 9, 1], dtype=np.int32)


def lists(kept: KeptSets) -> list[list[int]]:
    return [part.tolist() for part in np.split(kept.id_array(), kept.count_array().cumsum()[:-1])]


def packed(counts: list[int], ids: list[int]) -> KeptSets:
    return KeptSets(counts=np.array(counts, dtype="<u2").tobytes(), ids=np.array(ids, dtype="<i4").tobytes())


def test_a_set_is_ascending_and_costs_two_bytes_and_four_for_each_token() -> None:
    kept = kept_sets(SETS)
    assert lists(kept) == [[3], [2, 5, 9], [1, 7]]
    assert (len(kept.counts), len(kept.ids)) == (2 * 3, 4 * 6)
    assert kept.contradiction(SAMPLED, vocab_size=10, least=1) == ""


@given(st.lists(st.sets(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=12), st.data())
def test_what_is_cut_apart_joins_again(sets: list[set[int]], data: st.DataObject) -> None:
    kept = kept_sets([list(each) for each in sets])
    start = data.draw(st.integers(0, len(sets)))
    stop = data.draw(st.integers(start, len(sets)))
    assert lists(kept.between(start, stop)) == [sorted(each) for each in sets[start:stop]] or start == stop
    assert kept.between(start, stop) == kept_sets([list(each) for each in sets[start:stop]])
    assert joined([kept.between(0, start), kept.between(start, stop), kept.between(stop, len(sets))]) == kept


@pytest.mark.parametrize(
    ("kept", "complaint"),
    [
        (packed([1, 3], [3, 2, 5, 9]), "2 kept sets for 3 sampled tokens"),
        (KeptSets(counts=b"\1\0\1", ids=b""), "1.5 kept sets for 3"),
        (packed([0, 3, 2], [2, 5, 9, 1, 7]), "kept sets of 0 to 3 tokens"),
        (packed([1, 3, MAX_KEPT_TOKENS + 1], [3, 2, 5, 9]), "kept sets of 1 to 513 tokens, expected 1 to 512"),
        (packed([1, 3, 3], [3, 2, 5, 9, 1, 7]), "kept sets of 7 tokens in all, in 24 bytes"),
        (packed([1, 3, 1], [3, 2, 5, 9, 1, 7]), "kept sets of 5 tokens in all, in 24 bytes"),
        (packed([1, 3, 2], [3, 2, 5, 9, 1, 10]), r"kept token ids in [1, 10], vocabulary is [0, 10)"),
        (packed([1, 3, 2], [3, 2, 5, 9, -1, 1]), r"kept token ids in [-1, 9]"),
        (packed([1, 3, 2], [3, 2, 9, 5, 1, 7]), "a kept set is not in ascending order"),
        (packed([1, 3, 2], [3, 2, 9, 9, 1, 7]), "a kept set is not in ascending order"),
        (packed([1, 3, 2], [4, 2, 5, 9, 1, 7]), "a sampled token is not in its kept set"),
        (packed([1, 3, 2], [3, 2, 5, 8, 1, 7]), "a sampled token is not in its kept set"),
        (packed([1, 3, 2], [3, 2, 5, 9, 3, 7]), "a sampled token is not in its kept set"),  # in that of another
    ],
)
def test_a_contradiction_is_named(kept: KeptSets, complaint: str) -> None:
    assert complaint in kept.contradiction(SAMPLED, vocab_size=10, least=1)


def test_tokens_from_the_whole_vocabulary_have_no_set_where_that_is_allowed() -> None:
    kept = packed([1, 0, 2], [3, 1, 7])
    assert kept.contradiction(SAMPLED, vocab_size=10, least=0) == "" and kept.mean_size == 1.5
    assert "kept sets of 0 to 2 tokens, expected 1" in kept.contradiction(SAMPLED, vocab_size=10, least=1)
    wrong = packed([1, 0, 2], [3, 2, 7])
    assert "a sampled token is not in its kept set" in wrong.contradiction(SAMPLED, vocab_size=10, least=0)
    assert no_sets(3).contradiction(SAMPLED, vocab_size=10, least=0) == ""
