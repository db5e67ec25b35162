"""How the tokens of a pack are divided over the ranks that compute it together; `test_fsdp` runs such ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.batch.pack import TokenSequence, pack
from slipstream.learner.model.attention import CannotPack
from slipstream.learner.model.context_attention import check_heads
from slipstream.learner.model.packed_model import load_model
from slipstream.learner.ranks.context import Context
from slipstream.learner.ranks.ranks import Ranks
from tests.tools.run.tiny_model import FLOAT32, random_sequence, save_tiny_model


def context(rank: int, num_ranks: int) -> Context:
    """The place of a rank in a group that never exchanges anything."""
    return Context(rank=rank, num_ranks=num_ranks, group=dist.ProcessGroup(rank, num_ranks))


def sequence(*tokens: int) -> TokenSequence:
    """Every token but the first is trained."""
    return TokenSequence.bare(tokens, np.arange(len(tokens)) > 0)


def test_each_rank_has_as_many_tokens_and_predicts_what_its_states_are_before() -> None:
    shares = [pack([sequence(5, 6, 7), sequence(8, 9)], context=context(rank, 2)) for rank in (0, 1)]
    # Five tokens on two ranks: the last is there twice. Loss tokens are at 1, 2 and 4 of the pack.
    assert [packed.share.tokens.tolist() for packed in shares] == [[0, 1, 2], [3, 4, 4]]
    before = [packed.loss_states(before=1) for packed in shares]
    assert [(each.own.tolist(), each.places.tolist()) for each in before] == [([0, 1], [0, 1]), ([2], [0])]
    at = [packed.loss_states(before=0) for packed in shares]  # of a reward model
    assert [(each.own.tolist(), each.places.tolist()) for each in at] == [([0, 1], [1, 2]), ([2], [1])]


def test_the_state_at_the_end_of_a_shared_prefix_predicts_for_every_sequence_that_has_it() -> None:
    siblings = [sequence(5, 6, 7), sequence(5, 6, 8)]
    shares = [pack(siblings, share_prefixes=True, context=context(rank, 2)) for rank in (0, 1)]
    # Computed are 5, 6, 7 and 8, at 0, 1, 2 and 5 of the pack; 6 predicts both 7 and 8.
    assert [packed.share.tokens.tolist() for packed in shares] == [[0, 1], [2, 5]]
    assert shares[0].loss_states(before=1).own.tolist() == [0, 1, 2, 3]
    assert shares[0].loss_states(before=1).places.tolist() == [0, 1, 0, 1]
    assert shares[1].loss_states(before=1).own.tolist() == []


def test_a_pack_of_nothing_is_there_on_every_rank() -> None:
    shares = [pack([], context=context(rank, 4)) for rank in range(4)]
    assert [packed.share.tokens.tolist() for packed in shares] == [[0]] * 4


def test_heads_that_ranks_cannot_divide_are_refused_with_numbers_that_fit() -> None:
    for num_heads, num_kv_heads, context_ranks in ((32, 8, 4), (32, 8, 16), (4, 1, 2), (14, 2, 7 * 2)):
        check_heads(num_heads, num_kv_heads, context_ranks)
    with pytest.raises(CannotPack, match=r"its 14 attention heads.* got 4; use 1, 2, 14"):
        check_heads(14, 2, 4)
    with pytest.raises(CannotPack, match=r"its 8 key-value heads .* got 12; use 1, 2, 4, 8, 24"):
        check_heads(24, 8, 12)


def test_ranks_that_contexts_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`learner\.context_ranks` must be a divisor of learner\.ranks = 8, got 3"):
        load_config(None, ["learner.ranks=8", "learner.context_ranks=3"])


def test_a_pack_that_every_rank_would_train_whole_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    model = load_model(save_tiny_model(tmp_path / "model"), ranks=ranks, settings=FLOAT32)
    model.context_ranks = 2
    with pytest.raises(ValueError, match="pack it with the context"):
        model(pack([random_sequence(9, seed=0)]))
