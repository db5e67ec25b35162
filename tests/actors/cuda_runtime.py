"""A stand-in for the calls of the CUDA runtime that pin memory."""

import mmap
import threading

import pytest
import torch


class Runtime:
    """Takes what `torch.cuda.cudart()` takes, and refuses the pages from number `refused` on."""

    def __init__(self, refused: int = 1000) -> None:
        self.pinned: dict[int, int] = {}
        self.threads = set[str]()
        self._refused = refused

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert (address % mmap.PAGESIZE, num_bytes % mmap.PAGESIZE, flags) == (0, 0, 0) and num_bytes
        self.threads.add(threading.current_thread().name)
        if len(self.pinned) == self._refused:
            return 2
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.threads.add(threading.current_thread().name)
        del self.pinned[address]
        return 0


def stand_in(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> list[int]:
    """Let `runtime` be CUDA's; return the devices that are set."""
    devices = list[int]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return devices
