"""What clients of remote environments share: an event loop, calls in order, and a WebSocket connection."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

import aiohttp

from slipstream.envhub.env import EnvError
from slipstream.envhub.remote.env_secret import SECRET_VARIABLE

RETRY_S = 0.25
PING_S = 20.0  # the connection counts as lost when a ping has no reply for half of this time

T = TypeVar("T")


class SerialCalls:
    """Runs the calls of one client one after another, in an event loop that all clients of the process share.

    So a connection outlives the event loops of its callers, and callers without an event loop can use it. A cancelled
    call has ended, with its cleanup, before the next one starts.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._locked(work), shared_loop()))

    def run_blocking(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, and block the calling thread until it has ended."""
        return asyncio.run_coroutine_threadsafe(self._locked(work), shared_loop()).result()

    async def _locked(self, work: Callable[[], Awaitable[T]]) -> T:
        async with self._lock:
            return await work()


@contextlib.asynccontextmanager
async def within(seconds: float, drop: Callable[[], Awaitable[None]], why: str) -> AsyncIterator[None]:
    """Limit the time of a block, after which EnvError says `why`. Any failure calls `drop`.

    After it, it is unknown what the server did, and the reply to this request would be read as that to the next one.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        await drop()
        raise EnvError(why) from None
    except BaseException:
        await drop()
        raise


class WebSocketConnection:
    """One WebSocket. A task always reads from it, so that pings are answered while a policy generates."""

    def __init__(self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, url: str) -> None:
        self._session = session
        self._socket = socket
        self._url = url
        self._received: asyncio.Queue[bytes | str | EnvError] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    @property
    def is_up(self) -> bool:
        return not self._reading.done()

    async def request(self, message: bytes | str) -> bytes | str:
        """Send `message` and return the reply. Raises EnvError if the connection is lost."""
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # the reading task reports why
            if isinstance(message, str):
                await self._socket.send_str(message)
            else:
                await self._socket.send_bytes(message)
        reply = await self._received.get()
        if isinstance(reply, EnvError):
            self._received.put_nowait(reply)
            raise reply
        return reply

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self._session.close()  # closes the socket too

    async def _read(self) -> None:
        """Queue every message for `request`; at the end, queue the reason why the connection ended."""
        kinds = (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT)
        while (message := await self._socket.receive()).type in kinds:
            self._received.put_nowait(message.data)
        why = f"it closed the connection ({self._socket.close_code}): {message.extra or message.data or 'lost'}"
        self._received.put_nowait(EnvError(f"the environment at {self._url} is lost: {why}"))


async def connect(url: str, *, headers: Mapping[str, str], max_message_bytes: int) -> WebSocketConnection:
    """Return a WebSocket to `url`, retrying until there is one. Raises EnvError if the server rejects this client."""
    while True:
        session = aiohttp.ClientSession(headers=headers)
        try:
            socket = await session.ws_connect(url, heartbeat=PING_S, max_msg_size=max_message_bytes, compress=0)
            return WebSocketConnection(session, socket, url)
        except aiohttp.WSServerHandshakeError as error:
            await session.close()
            if error.status != 503:
                cure = f"; set {SECRET_VARIABLE} or `env.options.key_file`" if error.status == 401 else ""
                raise EnvError(f"{url} refuses with status {error.status}{cure}") from None
        except aiohttp.ClientError:  # the server has not started yet, or restarts
            await session.close()
        except BaseException:
            await session.close()
            raise
        await asyncio.sleep(RETRY_S)


@functools.cache
def shared_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all clients, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="remote-envs", daemon=True).start()
    return loop
