"""How a process ends in order: the first signal asks, the second insists, and children never outlive their parent."""

import ctypes
import os
import signal
import sys
import threading
from types import FrameType

EXIT_PREEMPTED = 75  # told to leave, and left in order: a supervisor may start it anew elsewhere
_PR_SET_PDEATHSIG = 1


class Shutdown:
    """Turns SIGTERM and SIGINT into a flag that loops look at; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.signal: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested.is_set():
            os._exit(128 + number)
        self.signal = number
        self.requested.set()

    @property
    def exit_code(self) -> int:
        """75 after SIGTERM, 130 after Ctrl-C, else 0."""
        return {int(signal.SIGTERM): EXIT_PREEMPTED, int(signal.SIGINT): 130}.get(self.signal or 0, 0)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, however it ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == 1:
            os._exit(EXIT_PREEMPTED)
