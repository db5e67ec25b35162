"""Serves the viewer's page and its JSON on loopback."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.http_guard import Border
from slipstream.replay.buffer.listing import NotRecorded
from slipstream.tools.viewer.archive_pages import ArchivePages
from slipstream.tools.viewer.marks import read_mark

MAX_SEARCH_CHARS = 1000
MAX_BODY_BYTES = 1 << 10  # of a mark
# A page of another site may make a browser connect here under a name of its own, to read as that site: such a name is
# refused. The port is not compared, as it differs behind a tunnel.
NAMES = ("127.0.0.1", "localhost")
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself has the rest of its policy
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def serve(pages: ArchivePages, front: Callable[[], str], *, port: int) -> None:
    """Serve the page that `front` makes, until Ctrl-C or SIGTERM. Raises ConfigError if the port is in use."""
    asyncio.run(_serve_until_a_signal(make_app(pages, front), port))


async def _serve_until_a_signal(app: web.Application, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    border = Border(max_body_bytes=MAX_BODY_BYTES, is_for_pages=True)
    async with contextlib.AsyncExitStack() as serving:
        try:
            url = await serving.enter_async_context(border.served(app, ("127.0.0.1", port)))
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}; leave it out for any free port") from error
        print(f"look at {url}/ (Ctrl-C ends it)", flush=True)
        await ended.wait()


def make_app(pages: ArchivePages, front: Callable[[], str]) -> web.Application:
    """The application. One thread reads the run, as a step may need much memory."""
    reader = ThreadPoolExecutor(max_workers=1)

    async def answer(read: Callable[[], dict[str, Any]]) -> web.Response:
        def encoded() -> str:
            return json.dumps(read(), allow_nan=False)

        try:
            return web.json_response(text=await asyncio.get_running_loop().run_in_executor(reader, encoded))
        except (NotRecorded, ConfigError) as error:
            return _refused(str(error), status=404 if isinstance(error, NotRecorded) else 409)

    async def whole(_: web.Request) -> web.Response:
        text = await asyncio.get_running_loop().run_in_executor(reader, front)
        return web.Response(text=text, content_type="text/html")

    async def page(request: web.Request) -> web.Response:
        return await answer(lambda: pages.page(request.match_info["path"]))

    async def search(request: web.Request) -> web.Response:
        text, before = request.query.get("text", ""), request.query.get("before", "")
        if not text or len(text) > MAX_SEARCH_CHARS or not (before.isascii() and before.isdecimal()):
            message = f"a search has a text of 1 to {MAX_SEARCH_CHARS} characters and a step"
            return _refused(message, status=400)
        return await answer(lambda: pages.search(text, before=int(before[:9])))

    async def mark(request: web.Request) -> web.Response:
        if request.headers.get("Origin") != f"http://{request.host}":  # browsers say whose page asks
            return _refused("only the viewer's own page may mark; open it and mark there", status=403)
        try:
            read = read_mark(await request.read())
        except ValueError as error:
            return _refused(str(error), status=400)
        return await answer(lambda: pages.mark(read))

    app = web.Application(middlewares=[_guard])
    app.router.add_get("/", whole)
    app.router.add_get("/api/search", search)
    app.router.add_get("/api/{path:.*}", page)
    app.router.add_post("/api/marks", mark)
    return app


def _refused(why: str, *, status: int) -> web.Response:
    return web.json_response({"error": why}, status=status)


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse other names than loopback's."""
    response: web.StreamResponse
    if request.host.rpartition(":")[0] not in NAMES and request.host not in NAMES:
        response = web.Response(status=403, text="open the viewer by http://127.0.0.1:PORT/")
    else:
        response = await handler(request)
    response.headers.update(HEADERS)
    return response
