"""An event loop whose clock jumps over every wait: timeouts and schedules to the instant, in no time.

Only for coroutines that wait for each other and for timers: a thread would not be waited for.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _SkippingSelector(selectors.DefaultSelector):
    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.skipped_s += timeout or 0.0
        return super().select(0)


class _SkippingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.skipped_s


def run_skipping(coroutine: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, by that clock."""
    with asyncio.Runner(loop_factory=_SkippingLoop) as runner:
        return runner.run(coroutine)
