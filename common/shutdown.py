"""How a process ends in order: a signal asks, Ctrl-C after it insists, and children never outlive their parent."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_PREEMPTED = 75  # told to leave, and left in order: a supervisor may start it anew elsewhere
LEAVE_S = 10.0  # beyond the drain: what it takes to hand in, give back and let go, when all goes wrong that may
# SIGUSR1 is what Slurm's `--signal=USR1@60` sends to a job that is about to be taken down.
_EXIT_CODES = {int(signal.SIGTERM): EXIT_PREEMPTED, int(signal.SIGUSR1): EXIT_PREEMPTED, int(signal.SIGINT): 130}
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Shutdown:
    """Turns SIGTERM, SIGUSR1 and SIGINT into a flag that loops look at; a SIGINT after it ends the process at once.

    SIGTERM asks however often it comes: a scheduler that takes a host away signals a supervisor and its children alike,
    and the supervisor signals them again.
    """

    def __init__(self, *, at_once: Callable[[], None] = lambda: None) -> None:
        """`at_once` is called before a SIGINT ends the process."""
        self.requested = threading.Event()
        self.signal: int | None = None
        self._at_once = at_once
        self._nothing_to_lose = False
        for number in _EXIT_CODES:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._nothing_to_lose:
            os._exit(_EXIT_CODES[number])
        if self.requested.is_set():
            if number == signal.SIGINT:
                self._at_once()
                os._exit(128 + number)
            return
        self.signal = number
        self.requested.set()

    def notice(self) -> None:
        """Ask as SIGTERM does, from any thread: the host will be taken away."""
        self.signal = self.signal or int(signal.SIGTERM)
        self.requested.set()

    @contextlib.contextmanager
    def nothing_to_lose(self) -> Iterator[None]:
        """While a process starts, and holds nothing that it would have to give back, the first signal ends it."""
        self._nothing_to_lose = True
        try:
            yield
        finally:
            self._nothing_to_lose = False

    def end_within(self, seconds: float) -> None:
        """From the first signal on, this process has `seconds`: whatever hangs by then, it ends with code 75.

        Who asks it to leave does not wait: the host goes, and what was not given back is found by its lease.
        """

        def watch() -> None:
            self.requested.wait()
            time.sleep(seconds)
            os._exit(EXIT_PREEMPTED)

        threading.Thread(target=watch, name="end-within", daemon=True).start()

    @property
    def exit_code(self) -> int:
        """75 after SIGTERM, SIGUSR1 or a notice, 130 after Ctrl-C, else 0."""
        return _EXIT_CODES.get(self.signal or 0, 0)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel ask this process to end when `parent_pid`, which started it, ends, however it ends (Linux only).

    The wish survives exec, so a launcher may pass this as preexec_fn, with its own pid: then it holds for any program.
    It is the thread that started this process whose end counts.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it ended before the kernel heard the wish
            os._exit(EXIT_PREEMPTED)
