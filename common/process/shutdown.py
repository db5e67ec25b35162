"""Ends processes in order: a signal asks, a later Ctrl-C ends at once, and children do not outlive their parent."""

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_PREEMPTED = 75  # asked to leave, and left in order: a supervisor may start it again elsewhere
LEAVE_S = 10.0  # after the drain: enough to hand in partials, release leases and close, even if every call is slow
AGAIN_S = 1.0  # signals that come closer together are one
MAX_WAIT_S = 0.5  # between two looks at a flag, for a signal right before the wait that it should have ended
# SIGUSR1 is what Slurm's `--signal=USR1@60` sends to a job that is about to be taken down.
_EXIT_CODES = {int(signal.SIGTERM): EXIT_PREEMPTED, int(signal.SIGUSR1): EXIT_PREEMPTED, int(signal.SIGINT): 130}
STOPPED_CODES = frozenset(_EXIT_CODES.values())
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Flag:
    """A flag that threads wait for, and that a signal handler may set.

    `threading.Event.set` hangs in a signal handler that interrupts `wait`: its lock is not reentrant. Python runs
    signal handlers in the main thread, between two of its instructions, also of those inside `wait`.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._changed = threading.Condition(threading.RLock())  # the handler may run in the thread that holds it

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, at most `timeout` seconds; return whether it is set."""
        ends = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._is_set and (left := ends - time.monotonic()) > 0:
                self._changed.wait(min(left, MAX_WAIT_S))
        return self._is_set


class Shutdown:
    """Turns SIGTERM, SIGUSR1 and SIGINT into a flag for the loops; a SIGINT after the first signal ends at once.

    A SIGTERM that comes again ends a supervisor too, if it comes a second later: a scheduler that takes a host away may
    send several at once. It changes nothing for children: the scheduler signals them, and then their supervisor.
    """

    def __init__(self, *, at_once: Callable[[], None] | None = None) -> None:
        """`at_once`, of a supervisor, is called before a signal ends the process."""
        self.requested = Flag()
        self.signal: int | None = None
        self._at_once = at_once
        self._asked_at = 0.0  # of the first signal, by the clock
        self._nothing_to_lose = False
        for number in _EXIT_CODES:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._nothing_to_lose:
            os._exit(_EXIT_CODES[number])
        if self.requested.is_set():
            again = number == self.signal == signal.SIGTERM and time.monotonic() - self._asked_at > AGAIN_S
            if number == signal.SIGINT or (again and self._at_once):
                if self._at_once:
                    self._at_once()
                os._exit(128 + number)
            return
        self.signal, self._asked_at = number, time.monotonic()
        self.requested.set()

    def notice(self) -> None:
        """Set the flag as SIGTERM does, from any thread: the host will be taken away."""
        self.signal = self.signal or int(signal.SIGTERM)
        self.requested.set()

    @contextlib.contextmanager
    def nothing_to_lose(self) -> Iterator[None]:
        """A context in which the first signal ends the process at once: it is starting and has nothing to give back."""
        self._nothing_to_lose = True
        try:
            yield
        finally:
            self._nothing_to_lose = False

    def end_within(self, seconds: float) -> None:
        """End this process with code 75 `seconds` after the first signal, even if something hangs.

        The host may be taken away at any time after the signal. Groups that were not given back are queued again when
        their leases expire.
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

    @property
    def stopped_code(self) -> int:
        """The exit code of a rank that stopped early: 75 too if only ranks on other hosts got the signal."""
        return self.exit_code or EXIT_PREEMPTED


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel send SIGTERM to this process when its parent `parent_pid` ends for any reason (Linux only).

    The setting survives exec, so a launcher may pass this function as preexec_fn, with its own pid, for any program.
    The signal comes when the thread that started this process ends.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it ended before the call to prctl
            os._exit(EXIT_PREEMPTED)
