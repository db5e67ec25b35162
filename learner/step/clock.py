"""Measures how long each part of a step takes."""

import time

import torch


class Clock:
    """Splits the wall clock into named parts that add up to it."""

    def __init__(self, device: torch.device) -> None:
        """Each lap waits for the kernels queued on `device`, so that their time counts for the right part."""
        self._device = device
        self._times_s: dict[str, float] = {}
        self._marks: list[tuple[str, torch.cuda.Event]] = []  # of parts that the device has perhaps not finished
        self._begin_lap(time.perf_counter())

    def lap(self, name: str) -> None:
        """Add the time since the last lap or mark to the part `name`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._add(name, now - self._last - self._marked_s())
        self._begin_lap(now)

    def mark(self, name: str) -> None:
        """The same as `lap`, but the host does not wait for a GPU: for parts that repeat within a lap."""
        if self._device.type == "cuda":
            self._marks.append((name, _event()))
        else:
            self.lap(name)

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, and begin again at 0."""
        taken, self._times_s = self._times_s, {}
        return taken

    def _begin_lap(self, now: float) -> None:
        self._last = now
        if self._device.type == "cuda":
            self._start = _event()

    def _marked_s(self) -> float:
        """Add the time of every part that was marked in this lap; return their sum. The device has finished them."""
        total_s = 0.0
        for name, event in self._marks:
            reached_s = self._start.elapsed_time(event) / 1000
            self._add(name, reached_s - total_s)
            total_s = reached_s
        self._marks = []
        return total_s

    def _add(self, name: str, elapsed_s: float) -> None:
        self._times_s[name] = self._times_s.get(name, 0.0) + elapsed_s


def _event() -> torch.cuda.Event:
    """A place in the queue of the current device, behind all that is in it."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
