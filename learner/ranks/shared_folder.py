"""Checks that the ranks of several hosts see one folder."""

import secrets
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.common.process.config_error import ConfigError
from slipstream.learner.ranks.ranks import Ranks


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
    blind = torch.tensor(ranks.num_ranks if mark.exists() else ranks.rank, device=ranks.device)
    dist.all_reduce(blind, op=dist.ReduceOp.MIN)
    if ranks.rank == 0:
        mark.unlink()
    if int(blind) < ranks.num_ranks:
        raise ConfigError(
            f"rank {int(blind)} does not see the folder {folder} of rank 0, but one of its own; mount one shared "
            "folder as `run.root` at the same path on every host of the learner"
        )
