"""A thread for one object whose calls block: the other episodes of the process continue while it works."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class OwnThread:
    """Runs calls one after another, all in one thread.

    A caller can be cancelled; the call itself cannot. So a thread that hangs is abandoned, and does not keep its
    process from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function()` in the thread, and return or raise its result."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # SystemExit too: the caller handles it, and the thread must not end
                future.set_exception(error)

        self._calls.put(partial(copy_context().run, work))  # processes that it starts belong to the caller's episode
        return await asyncio.wrap_future(future)

    async def call_last(self, function: Callable[[], T]) -> T:
        """Run one more call, and let the thread end."""
        try:
            return await self.call(function)
        finally:
            self.end()

    def end(self) -> None:
        """Let the thread end after the calls that are already queued."""
        self._calls.put(None)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


async def in_own_thread(name: str, function: Callable[[], T]) -> T:
    """Run one call in a thread of its own, and return or raise its result."""
    return await OwnThread(name).call_last(function)
