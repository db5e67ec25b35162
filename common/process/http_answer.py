"""Asks an HTTP server of another's, which may be down, slow or ill-behaved: a reply of any status, of a limited size.

No redirection and no proxy is followed: either would ask another host.
"""

import email.utils
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp


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


async def requested(
    url: str,
    body: bytes | None,
    headers: Mapping[str, str],
    *,
    timeout_s: float | None,
    max_bytes: int,
    method: str = "",
) -> Reply:
    """Send a POST of `body`, or a GET where it is None, and return the reply. Raises Passing if it is too large.

    Raises TimeoutError, OSError and aiohttp's ClientError too.
    """
    async with (
        # A small compressed reply could become any size, so none is decompressed.
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), auto_decompress=False) as session,
        session.request(
            method or ("GET" if body is None else "POST"),
            url,
            data=None if body is None else io.BytesIO(body),  # a large body as bytes would block the loop
            headers={**headers, "Accept-Encoding": "identity"},
            allow_redirects=False,
        ) as response,
    ):
        reply = bytearray()
        async for chunk in response.content.iter_any():
            reply += chunk
            if len(reply) > max_bytes and not response.ok:
                break
            if len(reply) > max_bytes:
                raise Passing(f"the reply has more than {max_bytes} bytes", is_malformed=True)
        wait_s = _seconds(response.headers.get("Retry-After", ""))
        return Reply(status=response.status, wait_s=wait_s, body=bytes(reply[:max_bytes]))


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
