"""Host memory that the processes of one machine share: the workers of an engine keep one copy of received weights."""

import mmap

import torch

from common.anonymous_memory import AnonymousMemory, Mapped, map_memory


class SharedMemory:
    """Anonymous memory, which nothing outlives: the kernel frees it with its last mapping."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = AnonymousMemory("slipstream-received-weights", num_bytes)
        self.path = self._memory.path  # valid for as long as this object lives
        self.buffer = _as_tensor(self._memory.mapped())


def map_shared(path: str) -> torch.Tensor:
    """The bytes at the `path` of another process's SharedMemory, without a copy; writing changes only this view."""
    return _as_tensor(map_memory(path, access=mmap.ACCESS_COPY))


def _as_tensor(memory: Mapped) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
