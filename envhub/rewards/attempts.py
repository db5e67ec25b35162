"""Attempts at a request, until one succeeds or a deadline has passed."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from slipstream.common.process.http_answer import Passing
from slipstream.envhub.env import EnvError

MAX_MALFORMED = 3  # answers of a server that samples with temperature 0 will hardly get better
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0

T = TypeVar("T")

log = logging.getLogger(__name__)


async def repeated(attempt: Callable[[], Awaitable[T]], *, url: str, deadline_s: float) -> T:
    """Return the result of the first attempt that raises no Passing; the wait between attempts grows.

    Raises EnvError when the deadline has passed, or would before another attempt, and after MAX_MALFORMED malformed
    replies.
    """
    ends_at, wait_s, num_malformed, why = time.monotonic() + deadline_s, FIRST_WAIT_S, 0, "no reply yet"
    try:
        async with asyncio.timeout(deadline_s) as limit:
            while True:
                try:
                    return await attempt()
                except Passing as failure:
                    why = str(failure)
                    num_malformed += failure.is_malformed
                    this_wait_s = max(failure.wait_s, wait_s * random.SystemRandom().uniform(0.75, 1.25))
                if num_malformed == MAX_MALFORMED:
                    raise EnvError(f"{url}: {why}; {num_malformed} answers were malformed")
                if time.monotonic() + this_wait_s > ends_at:
                    raise EnvError(f"{url}: {why}; another attempt would be too late (deadline_s is {deadline_s:g})")
                log.info("%s: %s; next attempt in %.1f s", url, why, this_wait_s)
                await asyncio.sleep(this_wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    except TimeoutError:
        if not limit.expired():
            raise
        raise EnvError(f"no answer from {url} within {deadline_s:g} s (deadline_s): {why}") from None
