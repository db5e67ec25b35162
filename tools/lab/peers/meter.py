"""Measures the CPU time and the memory of processes and all their descendants while they run."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil

EVERY_S = 2.0  # reading the memory of all processes takes some milliseconds of CPU time


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """All processes together at one time."""

    time: float  # Unix time
    cpu_seconds: float  # since they started
    memory_bytes: int  # proportional set size: a shared page counts once


@dataclass(kw_only=True, slots=True)
class Meter:
    """The readings of some processes, and of all their descendants."""

    readings: list[Reading] = field(default_factory=list)

    @contextlib.contextmanager
    def on(self, pids: Sequence[int]) -> Iterator[None]:
        """Read in a thread during the context, and once at its beginning."""
        ended = threading.Event()
        thread = threading.Thread(target=self._read_until, args=(ended, pids), name="meter")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    @property
    def peak_memory_bytes(self) -> int:
        return max(reading.memory_bytes for reading in self.readings)

    def cpu_between(self, started: float, until: float) -> float:
        """The CPU seconds that were used between two Unix times, interpolated between readings."""
        times = [reading.time for reading in self.readings]
        before, after = np.interp([started, until], times, [reading.cpu_seconds for reading in self.readings])
        return float(after - before)

    def _read_until(self, ended: threading.Event, pids: Sequence[int]) -> None:
        while True:
            self.readings.append(read(pids))
            if ended.wait(EVERY_S):
                return


def read(pids: Sequence[int]) -> Reading:
    """The CPU time and the memory of the processes `pids` and of all their descendants."""
    cpu_seconds, memory_bytes = 0.0, 0
    for process in _with_descendants(pids):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            used = process.cpu_times()
            # Those of children are of descendants that have ended.
            cpu_seconds += used.user + used.system + used.children_user + used.children_system
            memory_bytes += process.memory_full_info().pss
    return Reading(time=time.time(), cpu_seconds=cpu_seconds, memory_bytes=memory_bytes)


def _with_descendants(pids: Sequence[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            yield process
            yield from process.children(recursive=True)
