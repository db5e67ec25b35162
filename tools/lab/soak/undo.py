"""Ends each fault after its time, or when all faults end."""

import threading
from collections.abc import Callable


class Undoing:
    """The faults in progress. Each ends on a thread of its own, because the main thread may be waiting."""

    def __init__(self) -> None:
        self._due: list[_Undo] = []

    def later(self, seconds: float, undo: Callable[[], object]) -> None:
        """Call `undo` after so many seconds, or in `undo_all`."""
        self._due.append(_Undo(seconds, undo))
        self._due[-1].start()

    def undo_all(self) -> None:
        for undo in self._due:
            undo.now()

    def pending(self) -> list[threading.Thread]:
        """The threads that have not undone their fault yet."""
        return [undo for undo in self._due if undo.is_alive()]

    @property
    def is_disturbed(self) -> bool:
        """Whether a fault is in progress."""
        return bool(self.pending())


class _Undo(threading.Timer):
    """The end of a fault."""

    def now(self) -> None:
        if self.is_alive():
            self.cancel()
            self.join()
            self.function()
