"""Shared prefixes: where they are found, which tokens are computed, and how sequences with them are distributed."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.batch.pack import TokenSequence, bins_of_rank, micro_batches, pack
from slipstream.learner.batch.prefixes import cost_of, costs_of, lexicographic, runs_of, shared_lengths
from tests.tools.run.tiny_model import random_sequence

# Few different tokens, so that prefixes of every length are common; 256 and 65536 have their ones in higher bytes.
TOKENS = st.lists(st.lists(st.sampled_from([0, 1, 256, 65536]), min_size=1, max_size=8), min_size=1, max_size=12)


def sequence(*tokens: int) -> TokenSequence:
    """Trained from its second token on."""
    drawn = random_sequence(len(tokens), seed=0, prompt=1)
    return dataclasses.replace(drawn, tokens=np.array(tokens, dtype=np.int32))


def siblings(prompt: int, *lengths: int, seed: int) -> list[TokenSequence]:
    """Sequences of `lengths` of which the first `prompt` tokens are the same."""
    trunk = random_sequence(prompt, seed=seed).tokens
    drawn = [random_sequence(length, seed=1000 * seed + place, prompt=prompt) for place, length in enumerate(lengths)]
    return [dataclasses.replace(each, tokens=np.concatenate([trunk, each.tokens[prompt:]])) for each in drawn]


@given(TOKENS)
def test_what_a_sequence_shares_with_any_earlier_one_it_shares_with_the_one_before_it(drawn: list[list[int]]) -> None:
    sequences = [np.array(tokens, dtype=np.int32) for tokens in drawn]
    ordered = [sequences[index] for index in lexicographic(sequences)]
    assert [each.tolist() for each in ordered] == sorted(drawn)
    for place, (each, num_shared) in enumerate(zip(ordered, shared_lengths(ordered), strict=True)):
        common = [len(prefix_of(each, other)) for other in ordered[:place]]
        assert num_shared == min(max(common, default=0), len(each) - 1)


def prefix_of(first: np.ndarray, second: np.ndarray) -> list[int]:
    length = min(len(first), len(second))
    return next((first[:n].tolist() for n in range(length, 0, -1) if (first[:n] == second[:n]).all()), [])


@given(TOKENS)
def test_every_token_of_a_pack_has_its_place_among_the_computed(drawn: list[list[int]]) -> None:
    packed = pack([sequence(*tokens) for tokens in drawn], share_prefixes=True)
    assert [part.tolist() for part in torch.split_with_sizes(packed.tokens, packed.lengths)] == sorted(drawn)
    computed = packed.prefixes.computed if packed.prefixes else torch.arange(len(packed.tokens))
    states = packed.among_computed(torch.arange(len(packed.tokens)))
    assert packed.tokens[computed][states].tolist() == packed.tokens.tolist()
    assert packed.position_ids[computed][states].tolist() == packed.position_ids.tolist()
    assert sum(packed.computed_lengths) == len(computed) == len(set(states.tolist()))
    # Each prefix once; only the last token of a sequence may be computed again.
    prefixes = {tuple(tokens[:stop]) for tokens in drawn for stop in range(1, len(tokens) + 1)}
    assert len(prefixes) <= len(computed) < len(prefixes) + len(drawn)


def test_the_layout_of_two_siblings_and_a_stranger() -> None:
    packed = pack([sequence(5, 6, 9), sequence(7, 8), sequence(5, 6, 4, 3)], share_prefixes=True)
    assert packed.tokens.tolist() == [5, 6, 4, 3, 5, 6, 9, 7, 8]
    assert packed.lengths == (4, 3, 2) and packed.computed_lengths == (4, 1, 2)
    assert packed.prefixes.computed.tolist() == [0, 1, 2, 3, 6, 7, 8]
    assert packed.prefixes.places.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6]
    assert packed.prefixes.bounds.tolist() == [0, 4, 5, 7]
    assert packed.num_pairs == 10 + 3 + 3  # the one token of the second sequence sees itself and two before it
    assert pack([sequence(5, 6), sequence(7, 8)], share_prefixes=True).prefixes is None


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=30), st.integers(1, 4))
def test_runs_hold_every_sequence_once_and_are_never_too_full(drawn: list[tuple[int, int]], num_ranks: int) -> None:
    lengths = [length for length, _ in drawn]
    before = [0, *lengths[:-1]]
    shared = [min(share, length - 1, longest) for (length, share), longest in zip(drawn, before, strict=True)]
    costs = costs_of(lengths, shared)
    for max_tokens in (40, 100):
        runs = runs_of(lengths, shared, max_tokens=max_tokens, num_ranks=num_ranks)
        assert sorted(index for run in runs for index in run) == list(range(len(lengths)))
        loads = [cost_of(run, lengths, costs) for run in runs]
        assert loads == sorted(loads, reverse=True) and loads[0] <= max_tokens
        assert len(runs) % num_ranks == 0


def test_ranks_divide_siblings_evenly() -> None:
    """8 siblings of 20 tokens, of which 10 are shared: two runs of 4 cost 20 + 3 * (10 + 10 / 8) = 53.75 each."""
    assert runs_of([20] * 8, [0] + [10] * 7, max_tokens=200, num_ranks=2) == [range(4), range(4, 8)]


def test_siblings_meet_in_one_pack_that_costs_no_more_than_its_limit() -> None:
    batch = [*siblings(40, 50, 50, 50, 50, seed=1), *siblings(40, 50, 50, 50, 50, seed=2)]
    shuffled = [batch[index] for index in (0, 4, 1, 5, 2, 6, 3, 7)]
    apart = micro_batches(shuffled, max_tokens=100, num_ranks=1, rank=0)
    shared = micro_batches(shuffled, max_tokens=100, num_ranks=1, rank=0, share_prefixes=True)
    assert [packed.computed_lengths for packed in apart] == [(50, 50)] * 4
    assert [packed.computed_lengths for packed in shared] == [(50, 10, 10, 10)] * 2  # each costs 50 + 3 * (10 + 5)
    assert [packed.prefixes for packed in apart] == [None] * 4


def test_prefixes_are_shared_only_where_that_saves_enough() -> None:
    for prompt, shares in ((6, False), (30, True)):
        batch = siblings(prompt, 50, 50, 50, 50, seed=1)
        bins = bins_of_rank(batch, max_tokens=400, num_ranks=1, rank=0, share_prefixes=True)
        assert [each.share_prefixes for each in bins] == [shares]
        (without,) = bins_of_rank(batch, max_tokens=400, num_ranks=1, rank=0, share_prefixes=False)
        assert not without.share_prefixes


def test_the_members_of_a_bin_are_in_the_order_of_its_pack() -> None:
    batch = [*siblings(40, 50, 44, 49, 47, seed=1), *siblings(40, 50, 41, 46, 48, seed=2)]
    for share_prefixes in (False, True):
        for rank in range(2):
            for each in bins_of_rank(batch, max_tokens=120, num_ranks=2, rank=rank, share_prefixes=share_prefixes):
                expected = np.concatenate([batch[index].tokens for index in each.members])
                assert each.pack(batch).tokens.tolist() == expected.tolist()
                assert each.share_prefixes == share_prefixes


def test_a_sequence_that_does_not_fit_is_refused_where_prefixes_are_shared_too() -> None:
    with pytest.raises(ValueError, match=r"50 tokens .* raise `learner.micro_batch_tokens`"):
        micro_batches(siblings(40, 50, 50, seed=1), max_tokens=49, num_ranks=1, rank=0, share_prefixes=True)


def test_a_batch_of_nothing_has_a_pack_for_every_rank() -> None:
    (packed,) = micro_batches([], max_tokens=10, num_ranks=2, rank=1, share_prefixes=True)
    assert packed.lengths == (1,) and packed.prefixes is None
