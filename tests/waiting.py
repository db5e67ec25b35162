"""Other threads and processes: waits for what they do, and work beside a test."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 120.0  # for what takes seconds on an idle machine


def wait_until(look: Callable[[], T], what: str = "", *, timeout_s: float = DEADLINE_S) -> T:
    """What `look` sees as soon as it sees something."""
    deadline = time.monotonic() + timeout_s
    while not (seen := look()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for: {what}"
        time.sleep(0.02)
    return seen


async def until(holds: Callable[[], bool], what: str = "") -> None:
    """The same without holding the event loop."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for: {what}"
        await asyncio.sleep(0.005)


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """`work` continues in a thread of its own, and ends when its event is set, behind this."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
