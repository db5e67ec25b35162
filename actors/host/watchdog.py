"""Ends an actor whose event loop is blocked. Nothing else would notice: its heartbeats are blocked too.

An environment blocks the loop if it sleeps, waits for a lock or computes in `step`; then its timeout cannot interrupt
it.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback

from slipstream.envhub.isolation.offspring import end_offspring_of

LEASE_TIMES = 3  # a loop that has been blocked for so many `replay.lease_ttl_s` has lost every lease
EXIT_STANDSTILL = 1  # its supervisor starts it again
TICK_S = 1.0

log = logging.getLogger(__name__)


def watch(*, limit_s: float) -> None:
    """Start a thread that ends this process if the running event loop is blocked for `limit_s`.

    Only the time in which the thread itself runs is counted, so a suspended process is not ended. If the blocking code
    does not release the interpreter's lock, the thread cannot run either. Then Python's faulthandler writes every
    thread's stack and ends the process after twice as long; that limit also counts suspended time.
    """
    loop, of_loop = asyncio.get_running_loop(), threading.get_ident()
    threading.Thread(target=_watch, args=(loop, of_loop, limit_s), name="watchdog", daemon=True).start()


def _watch(loop: asyncio.AbstractEventLoop, of_loop: int, limit_s: float) -> None:
    while True:
        has_run, waited_s = threading.Event(), 0.0
        try:
            loop.call_soon_threadsafe(has_run.set)
        except RuntimeError:  # the loop is closed
            faulthandler.cancel_dump_traceback_later()
            return
        faulthandler.dump_traceback_later(2 * limit_s, exit=True, file=sys.stderr)
        while not has_run.wait(TICK_S):
            waited_s += TICK_S
            if waited_s >= limit_s:
                log.error("%s", _report(loop, of_loop, waited_s))
                end_offspring_of(os.getpid())
                os._exit(EXIT_STANDSTILL)
        time.sleep(TICK_S)


def _report(loop: asyncio.AbstractEventLoop, of_loop: int, waited_s: float) -> str:
    """The message about a blocked loop: the task, the call, and the whole stack."""
    task, frame = asyncio.current_task(loop), sys._current_frames()[of_loop]
    stack = traceback.extract_stack(frame)
    call = f"{stack[-1].filename}:{stack[-1].lineno}, in {frame.f_code.co_qualname}: `{stack[-1].line}`"
    return (
        f"the event loop has been blocked for {waited_s:.0f} s, and every episode and lease of this actor with it. "
        f"{task.get_name() if task else 'No task'} blocks it at {call}. The actor ends; its groups are leased again. "
        "An environment must not block the loop: make it await, run the call in a thread of its own "
        f"(own_thread.py), or serve it by `slipstream serve envs`.\n{''.join(traceback.format_list(stack))}"
    )
