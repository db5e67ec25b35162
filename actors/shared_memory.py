"""Host memory that the processes of one machine share: the workers of an engine keep one copy of received weights."""

import mmap
import os
import weakref
from pathlib import Path

import torch


class SharedMemory:
    """Anonymous memory (memfd), which nothing outlives: the kernel frees it with its last mapping."""

    def __init__(self, num_bytes: int) -> None:
        fd = os.memfd_create("slipstream-received-weights")
        weakref.finalize(self, os.close, fd)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"  # valid for as long as this object lives
        os.ftruncate(fd, num_bytes)
        self.buffer = _as_tensor(mmap.mmap(fd, num_bytes) if num_bytes else b"")


def map_shared(path: str) -> torch.Tensor:
    """The bytes at the `path` of another process's SharedMemory, without a copy; writing changes only this view."""
    with Path(path).open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        return _as_tensor(mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY) if num_bytes else b"")


def _as_tensor(memory: mmap.mmap | bytes) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
