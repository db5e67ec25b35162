"""`slipstream envs serve`: environments for whoever plays them from elsewhere. No code of theirs runs in this process.

    GET /health        what is served, and how much of it is in use
    GET /v1/episode    a WebSocket, which is one client's: envhub.asks, and envhub.env_client on the other side
    /openenv/NAME/     an OpenEnv server of that environment: ws, schema, health
    /agentgym/...      AgentGym servers: envhub.agentgym_server

A WebSocket is the lease of its episode. It ends with the client, and where the client is not heard of any more: pings
go there and must come back.
"""

import asyncio
import contextlib
import hmac
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

from aiohttp import WSCloseCode, WSMsgType, web

from common.wire import WireError
from envhub.serving.agentgym_server import AgentGymHost
from envhub.remote.env_protocol import MAX_MESSAGE_BYTES, Close, Closed, EnvFailed, NoSense, Open, decode_ask, encode_message
from envhub.serving.env_pool import EnvPool, Episode
from envhub.remote.env_secret import headers_with
from envhub.serving.openenv_server import SCHEMA, OpenEnvSession

MAX_BODY_BYTES = 1 << 20
SHUTDOWN_S = 10.0

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EnvServer:
    """Environments by `names`, in the workers of `pool`."""

    def __init__(self, pool: EnvPool, *, names: Collection[str], lease_s: float, secret: str) -> None:
        self.pool = pool
        self.names = names
        self.lease_s = lease_s
        self._wanted = headers_with(secret).get("Authorization", "")
        self._agentgym = AgentGymHost(pool, names=names, lease_s=lease_s)
        self._sockets: weakref.WeakSet[web.WebSocketResponse] = weakref.WeakSet()

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve at the URL that is given out. Behind it, every client was told to go. Raises OSError."""
        app = web.Application(middlewares=[self._admit], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/episode", self._episode)
        app.router.add_get("/openenv/{env}/ws", self._openenv)
        app.router.add_get("/openenv/{env}/schema", self._openenv_schema)
        app.router.add_get("/openenv/{env}/health", self._health)
        self._agentgym.add_routes(app)
        app.on_shutdown.append(self._send_away)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def accept(self, request: web.Request) -> web.WebSocketResponse:
        """The WebSocket that `request` wants, which the client is to be heard through as long as it lives."""
        # A ping goes out after `heartbeat` of silence, and half of that later the silence has been too long.
        socket = web.WebSocketResponse(
            heartbeat=self.lease_s * 2 / 3, max_msg_size=MAX_MESSAGE_BYTES, compress=False
        )  # fmt: skip
        await socket.prepare(request)
        self._sockets.add(socket)
        return socket

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Nobody without the secret, and no web page that somebody on this machine happens to look at."""
        if "Origin" in request.headers:
            raise web.HTTPForbidden(text="not for browsers")
        shown = request.headers.get("Authorization", "")
        if (
            request.path != "/health"
            and self._wanted
            and not hmac.compare_digest(shown.encode(), self._wanted.encode())
        ):
            raise web.HTTPUnauthorized(text="show the server's secret")
        return await handler(request)

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
        socket = await self.accept(request)
        async with contextlib.AsyncExitStack() as held:
            await answer_each(socket, _Session(self, held).answer)
        return socket

    async def _openenv(self, request: web.Request) -> web.WebSocketResponse:
        env, socket = self._named(request), await self.accept(request)
        async with contextlib.AsyncExitStack() as held:
            await answer_each(socket, OpenEnvSession(self.pool, env, held).answer)
        return socket

    async def _openenv_schema(self, request: web.Request) -> web.Response:
        self._named(request)
        return web.json_response(SCHEMA)

    def _named(self, request: web.Request) -> str:
        """The environment that the path names."""
        env = request.match_info["env"]
        if env not in self.names:
            raise web.HTTPNotFound(text=f"no environment {env!r} is served here, but {', '.join(self.names)}")
        return env

    async def _send_away(self, app: web.Application) -> None:
        for socket in list(self._sockets):
            await socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server ends")


class _Session:
    """One client, and the episode that it opened."""

    def __init__(self, server: EnvServer, held: contextlib.AsyncExitStack) -> None:
        self._server = server
        self._held = held  # the episode, until the client is gone
        self._episode: Episode | None = None

    async def answer(self, message: bytes | str) -> bytes:
        try:
            ask = decode_ask(message.encode() if isinstance(message, str) else message)
        except WireError as error:
            return encode_message(NoSense(why=str(error)))
        if isinstance(ask, Open):
            if ask.env not in self._server.names:
                served = ", ".join(self._server.names)
                return encode_message(NoSense(why=f"no environment {ask.env!r} is served here, but {served}"))
            await self._held.aclose()
            self._episode = await self._held.enter_async_context(self._server.pool.episode())
        if self._episode is None:
            return encode_message(EnvFailed(why="no environment is open; say Open first"))
        if not isinstance(ask, Close):
            return await self._episode.ask(ask)
        self._episode = None
        await self._held.aclose()
        return encode_message(Closed())


async def answer_each(
    socket: web.WebSocketResponse, answer: Callable[[bytes | str], Awaitable[bytes | str | None]]
) -> None:  # fmt: skip
    """Answer messages until the client leaves, or the answer is None.

    The client is listened to all along: an answer is not waited for beyond its leaving. Neither is it where the client
    speaks before it was answered, which nobody does who keeps to a protocol.
    """
    heard = asyncio.ensure_future(socket.receive())
    try:
        while (message := await heard).type in (WSMsgType.BINARY, WSMsgType.TEXT):
            heard = asyncio.ensure_future(socket.receive())
            answering = asyncio.ensure_future(answer(message.data))
            try:
                await asyncio.wait([answering, heard], return_when=asyncio.FIRST_COMPLETED)
            finally:
                answering.cancel()  # of no effect once it is done
            if not answering.done():
                await asyncio.wait([answering])
                break
            told = await answering
            if told is None:
                break
            with contextlib.suppress(ConnectionError):
                await (socket.send_str(told) if isinstance(told, str) else socket.send_bytes(told))
    finally:
        heard.cancel()
        await asyncio.wait([heard])
        await socket.close()
