"""Measures how long each part of a step takes."""

import time

import torch


class Clock:
    """Splits the wall clock into named parts that add up to it."""

    def __init__(self, device: torch.device) -> None:
        """Each lap waits for the kernels queued on `device`, so that their time counts for the right part."""
        self._device = device
        self._times_s: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to the part `name`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._times_s[name] = self._times_s.get(name, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, and begin again at 0."""
        taken, self._times_s = self._times_s, {}
        return taken
