"""The deadline of the current step: programs that a step runs are stopped before it, so that the step can answer.

An environment that does not answer in time has failed, and its episode is redone. A policy must not be able to cause
that with a slow program. So the program is stopped earlier, and the step's result is the policy's own.
"""

import asyncio
import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar

_deadline_s: ContextVar[float] = ContextVar("step_deadline_s", default=math.inf)  # by the loop's clock


@contextlib.contextmanager
def step_within(timeout_s: float) -> Iterator[None]:
    """Set the deadline: everything that the current task awaits in this block should end within `timeout_s`."""
    token = _deadline_s.set(asyncio.get_running_loop().time() + timeout_s)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the garbage collector closes this coroutine, in another task's context
            _deadline_s.reset(token)


def left_s() -> float:
    """Return the seconds left for the current step; infinite if no deadline is set."""
    return _deadline_s.get() - asyncio.get_running_loop().time()
