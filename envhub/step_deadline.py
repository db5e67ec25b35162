"""The deadline of the current step: programs that a step runs are stopped before it, so that the step can answer.

An environment that does not answer in time has failed, and its episode is redone. A policy must not be able to cause
that with a slow program. So the program is stopped earlier, and the step's result is the policy's own.
"""

import asyncio
import contextlib
import math
from contextvars import ContextVar

_deadline_s: ContextVar[float] = ContextVar("step_deadline_s", default=math.inf)  # by the loop's clock


class StepDeadline:
    """Everything that the current task awaits in this block should end within `timeout_s`.

    It is a class because a step of every turn enters it, and a generator takes three times as long.
    """

    __slots__ = ("_timeout_s", "_token")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        self._token = _deadline_s.set(asyncio.get_running_loop().time() + self._timeout_s)

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(ValueError):  # the garbage collector closes this coroutine, in another task's context
            _deadline_s.reset(self._token)


def left_s() -> float:
    """Return the seconds left for the current step; infinite if no deadline is set."""
    return _deadline_s.get() - asyncio.get_running_loop().time()
