"""A thread in which one object lives that blocks: the other episodes of a process go on while it works."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class OwnThread:
    """Runs one call after the other, all in one thread.

    Whoever waits for a call may be cut; the call itself cannot be, so a thread that hangs is left behind. It does not
    keep its process from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        """What `function()` gives or raises, in the thread."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(work)
        return await asyncio.wrap_future(future)

    def end(self) -> None:
        """Let the thread end behind the calls that it was given."""
        self._calls.put(None)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
