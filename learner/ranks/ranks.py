"""The processes that train together: one rank per device, with gloo on CPUs and NCCL on GPUs."""

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.config_error import ConfigError, require
from slipstream.common.process.kept_memory import keep_freed_memory
from slipstream.learner.ranks.context import Context

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process and its place among the processes that train together."""

    rank: int
    num_ranks: int
    device: torch.device
    mesh: DeviceMesh  # one dimension, over all ranks
    context: Context | None = None  # those that compute each micro-batch together; None: each computes its own

    @property
    def num_packing(self) -> int:
        """The number of micro-batches that are computed at a time."""
        return self.num_ranks // (self.context.num_ranks if self.context else 1)

    @property
    def packing_rank(self) -> int:
        """Which of them this rank computes, alone or with others."""
        return self.rank // (self.context.num_ranks if self.context else 1)

    @property
    def counts(self) -> bool:
        """Whether this rank's numbers count: those of all ranks of a context are the same, and count once."""
        return self.context is None or self.context.rank == 0

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank. Collective."""
        found = torch.tensor(int(mine), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)

    def add_up(self, sums: Tensor) -> None:
        """Replace `sums` of micro-batches by those over all of them, the same on every rank. Collective."""
        if not self.counts:
            sums.zero_()
        dist.all_reduce(sums)

    def summed(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Each of `sums` of micro-batches over all of them, in one collective."""
        stacked = torch.stack([value.double() for value in sums.values()])
        self.add_up(stacked)
        return dict(zip(sums, stacked.tolist(), strict=True))


def join_ranks(*, timeout_s: float, context_ranks: int = 1) -> Ranks:
    """Join the ranks that torchrun started; without torchrun, be the only rank.

    Every `context_ranks` neighbours compute their micro-batches together. A collective that waits longer than
    `timeout_s` for another rank raises RuntimeError. Raises ConfigError if there are too few ranks for that.
    """
    device = _device()
    # Tensors in host memory, as with `learner.cpu_offload`, need gloo besides NCCL.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    num_ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (num_ranks,))
    context = context_of(num_ranks, context_ranks)
    return Ranks(rank=dist.get_rank(), num_ranks=num_ranks, device=device, mesh=mesh, context=context)


def context_of(num_ranks: int, context_ranks: int) -> Context | None:
    """This rank's context; None if every rank computes its micro-batches alone. Every rank calls it."""
    require(
        num_ranks % context_ranks == 0,
        "learner.context_ranks",
        f"a divisor of the {num_ranks} ranks that were started",
        context_ranks,
        "start a multiple of it",
    )
    if context_ranks == 1:
        return None
    group, _ = dist.new_subgroups(group_size=context_ranks)  # type: ignore[no-untyped-call]
    return Context(rank=group.rank(), num_ranks=context_ranks, group=group)


def resolve_dtype(config: ModelConfig, device: torch.device) -> None:
    """Write the dtype that `model.dtype` auto means on `device` into `config`: what is recorded, and sent to actors."""
    if config.dtype == "auto":
        config.dtype = "bfloat16" if device.type == "cuda" else "float32"


def leave_ranks() -> None:
    """Destroy the process group. Every rank calls it."""
    dist.destroy_process_group()


def share(record: T | None, kind: type[T], *, ranks: Ranks, source: int = 0) -> T:
    """Return the record of rank `source` on every rank, whatever the other ranks pass. Collective.

    `kind` is its type, which msgspec must know.
    """
    frame = b""
    if ranks.rank == source:
        assert record is not None
        if ranks.num_ranks == 1:
            return record
        frame = msgspec.msgpack.encode(record)
    num_bytes = torch.tensor([len(frame)], device=ranks.device)
    dist.broadcast(num_bytes, src=source)
    payload = torch.empty(int(num_bytes), dtype=torch.uint8, device=ranks.device)
    if ranks.rank == source:
        payload.copy_(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
    dist.broadcast(payload, src=source)
    return msgspec.msgpack.decode(bytes(payload.cpu().numpy()), type=kind)


def refuse_together(reason: str, *, ranks: Ranks, cause: Exception | None = None) -> None:
    """Raise ConfigError on every rank unless `reason` is empty on all, with that of the first rank. Collective.

    So no rank waits for one that has failed. `cause` is this rank's error.
    """
    first = torch.tensor(ranks.rank if reason else ranks.num_ranks, device=ranks.device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if int(first) < ranks.num_ranks:
        raise ConfigError(share(reason, str, ranks=ranks, source=int(first))) from cause


def _device() -> torch.device:
    if not torch.cuda.is_available():
        keep_freed_memory()
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
