"""Checks that the ranks of several hosts see one folder."""

import secrets
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.learner.ranks.ranks import Ranks, refuse_together


def check_shared(folder: Path, *, ranks: Ranks) -> None:
    """Raise ConfigError on every rank unless all of them see the same `folder`. Every rank calls it.

    Each rank writes its shards of a checkpoint there. On different disks none would ever be whole.
    """
    number = torch.tensor(secrets.randbits(62) if ranks.rank == 0 else 0, device=ranks.device)
    dist.broadcast(number, src=0)
    mark = folder / f"seen_by_all_ranks_{int(number):x}"  # a new name, which no host can have cached as missing
    if ranks.rank == 0:
        mark.touch()
    dist.barrier()
    blind = (
        f"rank {ranks.rank} does not see the folder {folder} of rank 0, but one of its own; mount one shared folder as "
        "`run.root` at the same path on every host of the learner"
    )
    try:
        refuse_together("" if mark.exists() else blind, ranks=ranks)
    finally:
        if ranks.rank == 0:
            mark.unlink()
