"""Where the learner's time goes."""

import time

import torch


class Clock:
    """Splits the wall clock into named parts that add up to it."""

    def __init__(self, device: torch.device) -> None:
        """What `device` was told to do is waited for at each lap, so that a part's time is its own."""
        self._device = device
        self._times_s: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._times_s[name] = self._times_s.get(name, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """The parts since the last take, in seconds. What comes next is of the next."""
        taken, self._times_s = self._times_s, {}
        return taken
