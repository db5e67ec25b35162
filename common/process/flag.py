"""A flag that threads wait for, and that a signal handler may set."""

import math
import threading
import time

MAX_WAIT_S = 0.5  # between two looks at the flag, for a signal right before the wait that it should have ended


class Flag:
    """Like `threading.Event`, whose `set` hangs in a signal handler that interrupts `wait`: its lock is not reentrant.

    Python runs signal handlers in the main thread, between two of its instructions, also of those inside `wait`.
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
