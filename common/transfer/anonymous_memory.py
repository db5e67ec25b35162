"""Memory that the processes of one machine share without a name that could outlive them."""

import mmap
import os
import weakref
from pathlib import Path

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
