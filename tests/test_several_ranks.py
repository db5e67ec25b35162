"""That a rank which fails is seen, and that the others do not outlive it."""

import psutil
import pytest
import torch.distributed as dist

from slipstream.learner.ranks.ranks import Ranks
from tests.several_ranks import SeveralRanks


def fail_on_one(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise ValueError("one rank has failed")
    dist.barrier()


def test_what_a_rank_fails_with_is_shown_and_no_rank_is_left() -> None:
    ranks = SeveralRanks(fail_on_one, num_ranks=2)
    pids = [process.pid for process in ranks._processes]
    with pytest.raises(AssertionError, match="one rank has failed"):
        ranks.wait()
    assert not any(psutil.pid_exists(pid) for pid in pids)
