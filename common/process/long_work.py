"""Reports how far long work has come, so that a person can tell it from a process that hangs."""

import logging
import sys
import time
from collections.abc import Callable

EVERY_S = 10.0

log = logging.getLogger(__name__)


def report_on_stderr(text: str) -> None:
    """Print `text` beside the output of a verb."""
    print(text, file=sys.stderr, flush=True)


class LongWork:
    """Work of a known size, which reports how much is done every EVERY_S. Short work reports nothing."""

    def __init__(self, name: str, total: int, *, report: Callable[[str], None] = log.info) -> None:
        """`name` is what is done, such as "episodes of the expert"; `report` gets a line of text."""
        self._name = name
        self._total = total
        self._report = report
        self._begun_at = self._reported_at = time.monotonic()
        self._num_done = 0

    def done(self) -> None:
        """Count one more part as done."""
        self.at(self._num_done + 1)

    def at(self, num_done: int, *, more: str = "") -> None:
        """Note that `num_done` parts are done by now; `more` is added to the line."""
        self._num_done, now = num_done, time.monotonic()
        if now - self._reported_at < EVERY_S:
            return
        self._reported_at = now
        left = ""
        if 0 < num_done < self._total:
            left = f", about {(now - self._begun_at) * (self._total - num_done) / num_done:.0f} s more"
        self._report(f"{self._name}: {num_done} of {self._total}{left}{f'; {more}' if more else ''}")
