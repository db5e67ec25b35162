"""Requests to a server that may be down, slow or ill-behaved: attempts until a deadline, replies of a limited size."""

import asyncio
import email.utils
import io
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import aiohttp

from slipstream.envhub.env import EnvError

MAX_MALFORMED = 3  # answers of a server that samples with temperature 0 will hardly get better
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class Passing(Exception):
    """An attempt failed in a way that may pass."""

    def __init__(self, why: str, *, wait_s: float = 0.0, is_malformed: bool = False) -> None:
        super().__init__(why)
        self.wait_s = wait_s  # the least that the server asks for
        self.is_malformed = is_malformed


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One reply of a server, of any status."""

    status: int
    wait_s: float  # the seconds to wait that the server asks for
    body: bytes


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


async def requested(
    url: str, body: bytes | None, headers: Mapping[str, str], *, timeout_s: float | None, max_bytes: int
) -> Reply:
    """Send a POST of `body`, or a GET where it is None, and return the reply. Raises Passing if it is too large.

    Raises TimeoutError, OSError and aiohttp's ClientError too.
    """
    async with (
        # A small compressed reply could become any size, so none is decompressed.
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), auto_decompress=False) as session,
        session.request(
            "GET" if body is None else "POST",
            url,
            data=None if body is None else io.BytesIO(body),  # a large body as bytes would block the loop
            headers={**headers, "Accept-Encoding": "identity"},
            allow_redirects=False,
        ) as response,
    ):
        reply = bytearray()
        async for chunk in response.content.iter_any():
            reply += chunk
            if len(reply) > max_bytes:
                raise Passing(f"the reply has more than {max_bytes} bytes", is_malformed=True)
        wait_s = _seconds(response.headers.get("Retry-After", ""))
        return Reply(status=response.status, wait_s=wait_s, body=bytes(reply))


def _seconds(retry_after: str) -> float:
    """The seconds of a Retry-After header, which has a number or a date; 0 if it is missing or malformed."""
    try:
        return min(max(0.0, float(retry_after)), 86_400.0)
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0
