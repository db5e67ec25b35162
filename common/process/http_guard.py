"""The border of an HTTP server: what a request must show before any work is done for it, and the end of the server.

The key comes first, then the encoding and the length, and then the body waits for room beside those in flight. A
handler begins when the whole body is there. So a request that is refused costs no more than its headers.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

NUM_LARGEST = 4  # bodies of the largest size that are in flight at a time; smaller ones can be more
BODY_S = 60.0  # for a body to find room and to arrive
BUFFER_BYTES = 1 << 16  # of a connection, half of it, while its body waits for room
END_S = 4.0

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Border:
    """What a server accepts. A refusal is one of aiohttp's exceptions, with a text for the client."""

    max_body_bytes: int
    secret: str = ""  # that clients must show; empty: none
    why_refused: str = "the Authorization header must contain the server's key"
    is_for_pages: bool = False  # whether pages of a browser may ask
    _num_bytes: int = 0  # of all bodies in flight
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def served(self, app: web.Application, where: tuple[str, int] | Path) -> AsyncIterator[str]:
        """Serve `app` at a port or a Unix socket; yield the URL. Raises OSError."""
        app.middlewares.append(self._admit)
        # A time of 0 would be none: aiohttp then waits until clients have sent the other half of their requests. It
        # waits for the time twice. With `auto_decompress`, it would unpack a body before the key is checked.
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=END_S / 2,
            handler_cancellation=True,
            auto_decompress=False,
            lingering_time=END_S,
            read_bufsize=BUFFER_BYTES,
        )
        await runner.setup()
        try:
            if isinstance(where, Path):
                await web.UnixSite(runner, where).start()
                yield ""
            else:
                await web.TCPSite(runner, *where).start()
                yield f"http://{where[0]}:{runner.addresses[0][1]}"
        finally:
            try:
                async with asyncio.timeout(2 * END_S):
                    await runner.cleanup()
            except TimeoutError:
                log.warning("an HTTP server has not ended its requests within %g s, and is left", 2 * END_S)

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._check(request)
        try:
            async with asyncio.timeout(BODY_S) as limit, contextlib.AsyncExitStack() as held:
                await held.enter_async_context(self._room(request.content_length or 0))
                await request.read()  # aiohttp keeps it for the handler
                until_answered = held.pop_all()
        except TimeoutError:
            if not limit.expired():
                raise
            raise web.HTTPRequestTimeout(text=f"the body has not arrived within {BODY_S:g} s") from None
        async with until_answered:
            return await handler(request)

    @contextlib.asynccontextmanager
    async def _room(self, num_bytes: int) -> AsyncIterator[None]:
        """Room for a body among those in flight."""
        while self._num_bytes + num_bytes > NUM_LARGEST * self.max_body_bytes:
            self._freed.clear()
            await self._freed.wait()
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes
            self._freed.set()

    def _check(self, request: web.Request) -> None:
        """Raise what refuses the request, by its headers."""
        if "Origin" in request.headers and not self.is_for_pages:
            raise web.HTTPForbidden(text="requests of web pages (with an Origin header) are not accepted")
        shown = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        wanted = f"Bearer {self.secret}".encode()
        if self.secret and request.path != "/health" and not hmac.compare_digest(shown, wanted):
            raise web.HTTPUnauthorized(text=self.why_refused)
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise web.HTTPUnsupportedMediaType(
                text=f"a body in the Content-Encoding {encoding[:100]} is not accepted; send it without one"
            )
        if request.content_length is None and request.can_read_body:
            raise web.HTTPLengthRequired(text="a body needs a Content-Length; send it in one piece")
        if (request.content_length or 0) > self.max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(
                self.max_body_bytes,
                text=f"a body of {request.content_length} bytes is too large; the limit is {self.max_body_bytes}",
            )
