"""Memory that processes of one machine share without a name that could outlive them, and pages that CUDA pins.

The GPU copies from and to pinned pages at the speed of the bus, without the host.
"""

import logging
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

Mapped = mmap.mmap | bytes  # the latter if there are no bytes, which cannot be mapped


class AnonymousMemory:
    """A memfd: the kernel frees it once this object is gone and no process maps it, however they end."""

    def __init__(self, name: str, num_bytes: int) -> None:
        """`name` is shown in /proc only."""
        self.fd = os.memfd_create(name)
        weakref.finalize(self, os.close, self.fd)
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"  # for as long as this object lives
        os.ftruncate(self.fd, num_bytes)

    def mapped(self) -> Mapped:
        """Its bytes, as all processes see them."""
        num_bytes = os.fstat(self.fd).st_size
        return mmap.mmap(self.fd, num_bytes) if num_bytes else b""


def map_memory(path: str, *, access: int) -> Mapped:
    """Map the memory at the `path` of another process, which must be of the same user. Raises OSError.

    `access` is `mmap.ACCESS_WRITE`, which changes the memory, or `mmap.ACCESS_COPY`, which changes this mapping alone.
    """
    with Path(path).open("r+b" if access == mmap.ACCESS_WRITE else "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        return mmap.mmap(file.fileno(), num_bytes, access=access) if num_bytes else b""


class PinnedPages:
    """Pages of this process that CUDA has pinned, until `close`.

    A thread of its own makes every call. CUDA keeps the error of a failed call for the thread that made it, and torch
    would raise it from that thread's next kernel, as it cannot clear it: this thread has no kernels.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], *, device: int, cuda: Any) -> None:
        """Begin to pin `spans`, each an address and a number of bytes, for the GPU of that index.

        `cuda` is `torch.cuda`, which this room does not import.
        """
        self.spans = spans
        self._cuda = cuda
        self._device = device
        self.num_bytes = 0  # pinned so far
        self.settled = threading.Event()  # set once everything is pinned, or CUDA has refused
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pin-pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Unpin all; no copy may be under way."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        self._cuda.set_device(self._device)  # of this thread; otherwise it would start a context on GPU 0
        runtime = self._cuda.cudart()
        pinned = list[int]()
        for address, num_bytes in self.spans:
            if self._closing.is_set():
                break
            if code := int(runtime.cudaHostRegister(address, num_bytes, 0)):
                log.warning(
                    "CUDA cannot pin memory for weights: cudaHostRegister returned %d for %d bytes, after %d bytes; "
                    "copies from and to the rest are right, and slower",
                    code,
                    num_bytes,
                    self.num_bytes,
                )
                break
            pinned.append(address)
            self.num_bytes += num_bytes
        self.settled.set()
        self._closing.wait()
        for address in pinned:
            runtime.cudaHostUnregister(address)


def spans_of(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The address and bytes of whole pages that contain `extents`, each an address and a number of bytes.

    No page is in two spans, and no extent in parts of two.
    """
    page, spans = mmap.PAGESIZE, list[tuple[int, int]]()
    for address, num_bytes in sorted(each for each in extents if each[1]):
        first, end = address // page * page, -(-(address + num_bytes) // page) * page
        if spans and first <= sum(spans[-1]):  # the end of the span before
            first, _ = spans.pop()
        spans.append((first, end - first))
    return spans
