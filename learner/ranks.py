"""The processes that train together: one rank per device, with gloo on CPUs and NCCL on GPUs."""

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.config import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process and its place among the processes that train together."""

    rank: int
    num_ranks: int
    device: torch.device
    mesh: DeviceMesh  # one dimension, over all ranks


def join_ranks(*, timeout_s: float) -> Ranks:
    """Join the ranks that torchrun started; without torchrun, be the only rank.

    A collective that waits longer than `timeout_s` for another rank raises RuntimeError.
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
    return Ranks(rank=dist.get_rank(), num_ranks=num_ranks, device=device, mesh=mesh)


def resolve_dtype(config: Config, device: torch.device) -> None:
    """Write the dtype that `model.dtype` auto means on `device` into `config`: what is recorded, and sent to actors."""
    if config.model.dtype == "auto":
        config.model.dtype = "bfloat16" if device.type == "cuda" else "float32"


def leave_ranks() -> None:
    """Destroy the process group. Every rank calls it."""
    dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
