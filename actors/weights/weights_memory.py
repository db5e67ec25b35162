"""The host memory of the weights that an engine received last: one flat buffer for all its workers.

The first worker owns it, and the others map it. Where the model is on a GPU, each worker has CUDA pin its mapping, so
that a load runs at the speed of the bus.
"""

import mmap
from pathlib import Path

import torch

from slipstream.common.transfer.host_memory import AnonymousMemory, Mapped, PinnedPages, map_memory, spans_of

NAME = "slipstream-received-weights"  # of shared memory, in /proc


class Pinning:
    """Has CUDA pin a buffer that is used again, until `end`; without a GPU it does nothing."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._num_uses = 0
        self.pages: PinnedPages | None = None

    def used(self, flat: torch.Tensor) -> None:
        """Say that a version in `flat` was loaded. At the second one, begin to pin it, and do not wait.

        Not at the first one: a buffer that came by a pull of whole weights may be replaced by the next pull.
        """
        self._num_uses += 1
        if self._device is None or self._num_uses != 2 or not flat.numel():
            return
        assert self._device.index is not None, "vLLM gives each worker the index of its GPU"
        spans = spans_of([(flat.data_ptr(), flat.nbytes)])
        self.pages = PinnedPages(spans, device=self._device.index, cuda=torch.cuda)

    def end(self) -> None:
        """Unpin, before the buffer is freed: CUDA would take whatever comes to its address for pinned. Idempotent."""
        self._num_uses = 0
        if self.pages is not None:
            self.pages.close()
            self.pages = None


class WeightsMemory:
    """Of the process that receives. `flat` is uint8; another tensor takes its place if another size is received."""

    def __init__(self, *, shared: bool = False, device: torch.device | None = None) -> None:
        """With `shared`, other processes can map it at `path`; `device` is that of the model, if it is a GPU."""
        self._memory = AnonymousMemory(NAME, 0) if shared else None
        self.flat = torch.empty(0, dtype=torch.uint8)
        self.pinning = Pinning(device)

    @property
    def path(self) -> str:
        """Where other processes of this machine can map `flat`, for as long as it stays; empty if not shared."""
        return self._memory.path if self._memory is not None else ""

    def resize(self, num_bytes: int) -> None:
        """Have room for `num_bytes`; what was in it is lost, if that is another size."""
        if self.flat.numel() == num_bytes:
            return
        self.pinning.end()
        if self._memory is None:
            self.flat = torch.empty(num_bytes, dtype=torch.uint8)
        else:
            self._memory = AnonymousMemory(NAME, num_bytes)
            self.flat = _as_tensor(self._memory.mapped())

    def adopt(self, received: torch.Tensor) -> None:
        """Have the bytes of `received`: the tensor itself, or a copy if this memory is shared."""
        if self._memory is None:
            self.pinning.end()
            self.flat = received
        else:
            self.resize(received.numel())
            self.flat.copy_(received)


class MappedWeights:
    """The WeightsMemory of another process."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is that of the model, if it is a GPU."""
        self._on_gpu = device is not None
        self._file: tuple[int, int] | None = None  # device and inode of what is mapped
        self.flat = torch.empty(0, dtype=torch.uint8)  # mapped last, for a GPU
        self.pinning = Pinning(device)

    def at(self, path: str) -> torch.Tensor:
        """The bytes at `path`, as a flat uint8 tensor, without a copy.

        On a CPU they are mapped each time, and writing changes only this view. For a GPU the same memory is mapped
        once, as its owner has it: to pin a private view would copy each of its pages.
        """
        if not self._on_gpu:
            return _as_tensor(map_memory(path, access=mmap.ACCESS_COPY))
        status = Path(path).stat()
        if self._file != (status.st_dev, status.st_ino):
            self.pinning.end()
            self.flat = _as_tensor(map_memory(path, access=mmap.ACCESS_WRITE))
            self._file = (status.st_dev, status.st_ino)
        return self.flat


def _as_tensor(memory: Mapped) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
