import dataclasses

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.records.kept_sets import kept_sets
from slipstream.common.records.trajectory import Trajectory, VersionSpan
from slipstream.learner.batch.pack import (
    TokenSequence,
    balanced_bins,
    count_trajectories,
    micro_batches,
    numbered,
    pack,
    sequences_of,
    with_lags,
)
from slipstream.learner.checkpoint.checkpoint import Progress
from tests.learner.even_game import recorded
from tests.tools.run.tiny_model import random_sequence


def two_branches() -> Trajectory:
    """Tokens 10 11 [12] and, history rewritten, 20 [21 22]; those in brackets were sampled."""
    logprobs, sampled = [0, 0, -0.5, 0, -1.5, -2.5], [False, False, True, False, True, True]
    return recorded([10, 11, 12, 20, 21, 22], logprobs, sampled, branch_starts=[0, 3])


def test_each_branch_is_a_sequence_with_the_trajectorys_advantage() -> None:
    sequences = sequences_of(two_branches(), advantage=0.75)
    assert [each.tokens.tolist() for each in sequences] == [[10, 11, 12], [20, 21, 22]]
    assert [each.loss_mask.tolist() for each in sequences] == [[False, False, True], [False, True, True]]
    assert [each.behaviour_logprobs.tolist() for each in sequences] == [[0, 0, -0.5], [0, -1.5, -2.5]]
    assert [each.advantages.tolist() for each in sequences] == [[0.75] * 3] * 2


def test_branches_keep_the_number_and_the_length_of_their_trajectory_in_any_pack() -> None:
    batch = numbered([[random_sequence(9, seed=0)], sequences_of(two_branches(), advantage=0.75)])
    assert [sequence.trajectory for sequence in batch] == [0, 1, 1]
    assert [sequence.trajectory_tokens for sequence in batch] == [6, 3, 3]
    assert count_trajectories(batch) == 2
    packs = micro_batches(batch, max_tokens=9, num_ranks=1, rank=0)
    assert [packed.lengths for packed in packs] == [(9,), (3, 3)]
    assert [packed.loss_sequences.trajectories.tolist() for packed in packs] == [[0], [1, 1]]
    apart = [pack([sequence]).loss_sequences for sequence in batch[1:]]
    assert [sequences.trajectory_tokens.tolist() for sequences in apart] == [[3], [3]]


def test_each_branch_knows_the_version_and_the_lag_of_its_tokens() -> None:
    """21 and 22 are of one turn, in the middle of which newer weights came in."""
    spans = [VersionSpan(start=a, stop=b, policy_version=v) for a, b, v in [(2, 3, 5), (4, 5, 10), (5, 6, 12)]]
    sequences = sequences_of(msgspec.structs.replace(two_branches(), version_spans=spans), advantage=0.75)
    unknown = pack(sequences)
    assert unknown.lags is None and unknown.loss_lags.tolist() == [0, 0, 0], "as new as can be"
    assert [sequence.policy_versions.tolist() for sequence in sequences] == [[0, 0, 5], [0, 10, 12]]
    begun = Progress(step=4, policy_version=5, highest_published=9, next_group_id=0, tokens_trained=0)
    at = msgspec.structs.replace(begun.resumed_as(10), policy_version=13)  # 10 has the weights of 5
    lagged = with_lags(sequences, at.lags)
    assert [sequence.lags.tolist() for sequence in lagged] == [[0, 0, 3], [0, 3, 1]]
    packed = pack([lagged[1], lagged[0]])
    assert packed.lags is not None and packed.lags.tolist() == [0, 3, 1, 0, 0, 3]
    assert packed.loss_lags.tolist() == [3, 1, 3]


def test_a_sampled_token_without_a_prompt_before_it_is_refused() -> None:
    with pytest.raises(ValueError, match="token 2 is the first of a sequence"):
        sequences_of(recorded([10, 11, 12], [0, -1, -1], [False, True, True], branch_starts=[0, 2]), advantage=1.0)


def test_positions_start_again_with_each_sequence_and_the_longest_comes_first() -> None:
    packed = pack([random_sequence(2, seed=0, prompt=1), random_sequence(3, seed=1, prompt=1)])
    assert packed.lengths == (3, 2)
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert packed.loss_mask.tolist() == [False, True, True, False, True]
    assert packed.tokens[:3].tolist() == random_sequence(3, seed=1).tokens.tolist()
    assert packed.tokens.dtype == torch.int64


def test_every_rank_gets_the_same_number_of_packs_even_if_some_have_nothing() -> None:
    sequences = [random_sequence(10, seed=0)]
    (busy,), (idle,) = (micro_batches(sequences, max_tokens=16, num_ranks=2, rank=rank) for rank in (0, 1))
    assert (busy.lengths, idle.lengths) == ((10,), (1,)) and not idle.loss_mask.any()
    assert None not in (idle.old_values, idle.returns, idle.lags), "it has what a critic asks of every pack"


def test_there_is_only_one_more_round_where_the_sequences_do_not_fit_into_fewer() -> None:
    assert balanced_bins([6, 6, 6], max_tokens=10, num_ranks=1) == [[0], [1], [2]]


def test_a_sequence_that_does_not_fit_is_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match=r"17 tokens .* raise `learner.micro_batch_tokens`"):
        micro_batches([random_sequence(17, seed=0)], max_tokens=16, num_ranks=1, rank=0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(40, 100), st.integers(1, 4))
def test_bins_hold_each_sequence_once_and_are_full_alike(lengths: list[int], max_tokens: int, num_ranks: int) -> None:
    """The shortest sequence of a bin was put there last, when the bin was the emptiest of all."""
    bins = balanced_bins(lengths, max_tokens=max_tokens, num_ranks=num_ranks)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in members) for members in bins]
    assert loads == sorted(loads, reverse=True) and loads[0] <= max_tokens  # so that those of one round are neighbours
    for load, members in zip(loads, bins, strict=True):
        assert load - min(loads) <= min((lengths[index] for index in members), default=0)
    # There is a round more only where every bin was too full for some sequence.
    room = max_tokens - max(lengths)
    assert len(bins) % num_ranks == 0 and (len(bins) - num_ranks) * room < sum(lengths)
    assert len(bins) == num_ranks or sum(lengths) > room * num_ranks
    assert bins == balanced_bins(lengths, max_tokens=max_tokens, num_ranks=num_ranks)


def kept_branches() -> Trajectory:
    """The two branches, chosen from {12}, {21, 30} and {7, 8, 22}."""
    return msgspec.structs.replace(two_branches(), kept=kept_sets([[12], [30, 21], [22, 7, 8]]))


def test_kept_sets_go_with_their_branch_and_lie_in_the_order_of_the_pack() -> None:
    first, second = sequences_of(kept_branches(), advantage=1.0)
    assert (first.kept, second.kept) == (kept_sets([[12]]), kept_sets([[21, 30], [7, 8, 22]]))
    packed = pack([first, second, random_prompt(5)])
    assert packed.lengths == (5, 3, 3)
    assert packed.tokens[packed.loss_mask].tolist() == [12, 21, 22]
    assert packed.kept.tolist() == [[12, -1, -1], [21, 30, -1], [7, 8, 22]]
    assert packed.to(torch.device("cpu")).kept is packed.kept
    assert pack([random_prompt(5)]).kept is None


def random_prompt(length: int) -> TokenSequence:
    """Nothing sampled, so nothing kept."""
    return random_sequence(length, seed=0, prompt=length)


def test_tokens_without_a_kept_set_are_packed_beside_those_with_one() -> None:
    first, second = sequences_of(kept_branches(), advantage=1.0)
    half = dataclasses.replace(second, kept=kept_sets([[], [7, 8, 22]]))
    packed = pack([first, half, dataclasses.replace(random_sequence(4, seed=0), temperature=1.0)])
    rows = dict(zip(packed.tokens[packed.loss_mask].tolist(), packed.kept.tolist(), strict=True))
    assert (rows[12], rows[21], rows[22]) == ([12, -1, -1], [-1, -1, -1], [7, 8, 22])
    assert packed.has_kept.tolist() == [max(row) >= 0 for row in packed.kept.tolist()]
    assert pack([first, second]).has_kept is None and pack([random_sequence(4, seed=0)]).kept is None


def test_a_pack_has_the_temperature_of_each_loss_token_or_one_for_all() -> None:
    hot = dataclasses.replace(random_sequence(6, seed=1), temperature=1.5)
    cold = dataclasses.replace(random_sequence(5, seed=2), temperature=0.5)
    prompt = random_prompt(9)  # nothing of it was sampled
    packed = pack([cold, hot, prompt])
    assert isinstance(packed.temperature, torch.Tensor)
    assert packed.temperature.tolist() == [1.5] * 3 + [0.5] * 2
    assert pack([cold, prompt]).temperature == 0.5 and pack([prompt]).temperature is None
    (branch, _) = sequences_of(two_branches(), advantage=1.0)
    assert branch.temperature == two_branches().sampling.temperature
    with pytest.raises(ValueError, match="only some sequences of a pack have a temperature"):
        pack([cold, random_sequence(4, seed=0)])
