"""Runs an actor's coroutine on an event loop that an environment cannot end."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` like `asyncio.run`, but ignore SystemExit and KeyboardInterrupt of other tasks and of callbacks.

    asyncio ends the loop when any task raises one of these, and an environment may start tasks. Code that awaits such a
    task still gets the exception. Our own signal handling in `common/process/shutdown.py` raises neither.
    """
    with asyncio.Runner() as runner:
        task = runner.get_loop().create_task(main)
        while True:
            try:
                return runner.get_loop().run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as error:
                if task.done():
                    raise
                log.warning("a task of an environment raised %s; the event loop continues", type(error).__name__)
