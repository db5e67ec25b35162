"""`slipstream serve envs`: serve environments to remote clients. The environments' code runs in worker processes.

    GET /health        the served environments and the load
    GET /v1/episode    a WebSocket for one client, with the messages of slipstream.envhub.remote.env_protocol

A WebSocket is the lease of its episode. The lease ends when the client disconnects or does not answer a ping in time.
"""

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Collection

from aiohttp import WSCloseCode, WSMsgType, web

from slipstream.common.process.http_guard import Border
from slipstream.common.process.wire import WireError
from slipstream.envhub.remote import env_protocol as protocol
from slipstream.envhub.serving.env_pool import EnvPool, Episode

MAX_BODY_BYTES = 1 << 20  # of a request, or of a message in a WebSocket
MAX_CLIENTS = 1024  # connected by a WebSocket


class EnvServer:
    """Serves the environments `names`, which run in the workers of `pool`."""

    def __init__(self, pool: EnvPool, *, names: Collection[str], lease_s: float, secret: str) -> None:
        self.pool = pool
        self.names = names
        self.lease_s = lease_s
        self._border = Border(
            max_body_bytes=MAX_BODY_BYTES,
            secret=secret,
            why_refused="the Authorization header must contain the server's secret",
        )
        self._sockets: weakref.WeakSet[web.WebSocketResponse] = weakref.WeakSet()

    def listening(self, host: str, port: int) -> contextlib.AbstractAsyncContextManager[str]:
        """Serve at the URL that is yielded, and disconnect every client on exit. Raises OSError."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/episode", self._episode)
        app.on_shutdown.append(self._disconnect)
        return self._border.served(app, (host, port))

    async def _health(self, request: web.Request) -> web.Response:
        pool = self.pool
        return web.json_response(
            {
                "status": "ok" if pool.num_workers else "no worker",
                "environments": list(self.names),
                "episodes": pool.num_episodes,
                "max_episodes": pool.max_episodes,
                "workers": pool.num_workers,
                "workers_lost": pool.num_lost,
            },
            status=200 if pool.num_workers else 503,
        )

    async def _episode(self, request: web.Request) -> web.WebSocketResponse:
        if sum(not each.closed for each in self._sockets) >= MAX_CLIENTS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_CLIENTS} clients are connected; try again later")
        # aiohttp sends a ping after `heartbeat` without a message, and closes when half of that passes without a reply.
        socket = web.WebSocketResponse(heartbeat=self.lease_s * 2 / 3, max_msg_size=MAX_BODY_BYTES, compress=False)
        await socket.prepare(request)
        self._sockets.add(socket)
        async with contextlib.AsyncExitStack() as slot:
            await _answer_each(socket, _Session(self, slot).answer)
        return socket

    async def _disconnect(self, app: web.Application) -> None:
        closing = [socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server ends") for socket in self._sockets]
        await asyncio.gather(*closing)


class _Session:
    """One client, and the episode that it opened."""

    def __init__(self, server: EnvServer, slot: contextlib.AsyncExitStack) -> None:
        self._server = server
        self._slot = slot  # closing it ends the episode; the server closes it when the client disconnects
        self._episode: Episode | None = None

    async def answer(self, message: bytes | str) -> bytes:
        try:
            request = protocol.decode_request(message.encode() if isinstance(message, str) else message)
        except WireError as error:
            return protocol.encode_message(protocol.InvalidRequest(why=str(error)))
        if isinstance(request, protocol.Open):
            if request.env not in self._server.names:
                why = f"the server has no environment {request.env!r}; it serves {', '.join(self._server.names)}"
                return protocol.encode_message(protocol.InvalidRequest(why=why))
            await self._slot.aclose()
            self._episode = await self._slot.enter_async_context(self._server.pool.episode())
        if self._episode is None:
            return protocol.encode_message(protocol.EnvFailed(why="no environment is open; send Open first"))
        if not isinstance(request, protocol.Close):
            return await self._episode.request(request)
        self._episode = None
        await self._slot.aclose()
        return protocol.encode_message(protocol.Closed())


async def _answer_each(socket: web.WebSocketResponse, answer: Callable[[bytes | str], Awaitable[bytes]]) -> None:
    """Answer messages until the client disconnects.

    The server keeps reading while it computes an answer. It cancels the answer when the client disconnects, or when the
    client sends a message before it got the answer, which the protocol does not allow.
    """
    receiving = asyncio.ensure_future(socket.receive())
    try:
        while (message := await receiving).type in (WSMsgType.BINARY, WSMsgType.TEXT):
            receiving = asyncio.ensure_future(socket.receive())
            answering = asyncio.ensure_future(answer(message.data))
            try:
                await asyncio.wait([answering, receiving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                answering.cancel()  # no effect if it is done
            if not answering.done():
                await asyncio.wait([answering])
                break
            with contextlib.suppress(ConnectionError):
                await socket.send_bytes(await answering)
    finally:
        receiving.cancel()
        await asyncio.wait([receiving])
        await socket.close()
