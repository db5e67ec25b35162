"""What every client of an environment elsewhere needs: a loop of its own, one thing at a time, and a WebSocket."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import aiohttp

from envhub.env import EnvError
from envhub.remote.env_secret import SECRET_VARIABLE

RETRY_S = 0.25
PING_S = 20.0  # a server that is silent on a ping for half of that is gone

T = TypeVar("T")


class InTurn:
    """Does one client's work in the loop of a thread that all clients of the process share.

    So a connection outlives its callers' loops, and may be asked by who has none. What was cancelled is over, with all
    that it leaves behind, before the next begins.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def do(self, work: Callable[[], Awaitable[T]]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._alone(work), far_loop()))

    def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Block until it is done."""
        return asyncio.run_coroutine_threadsafe(self._alone(work), far_loop()).result()

    async def _alone(self, work: Callable[[], Awaitable[T]]) -> T:
        async with self._turn:
            return await work()


class Line:
    """One WebSocket. It is always listened to, so that pings are answered while a policy thinks."""

    def __init__(self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, url: str) -> None:
        self._session = session
        self._socket = socket
        self._url = url
        self._heard: asyncio.Queue[bytes | str | EnvError] = asyncio.Queue()
        self._listening = asyncio.create_task(self._listen())

    @property
    def is_up(self) -> bool:
        return not self._listening.done()

    async def ask(self, message: bytes | str) -> bytes | str:
        """What the other side says to that. Raises EnvError where the connection is lost."""
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # whoever listens hears why
            if isinstance(message, str):
                await self._socket.send_str(message)
            else:
                await self._socket.send_bytes(message)
        answer = await self._heard.get()
        if isinstance(answer, EnvError):
            self._heard.put_nowait(answer)
            raise answer
        return answer

    async def close(self) -> None:
        self._listening.cancel()
        await asyncio.wait([self._listening])
        await self._session.close()  # and the socket with it

    async def _listen(self) -> None:
        """Put every message where `ask` waits for it; at the end, why there are no more."""
        kinds = (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT)
        while (message := await self._socket.receive()).type in kinds:
            self._heard.put_nowait(message.data)
        why = f"it closed the connection ({self._socket.close_code}): {message.extra or message.data or 'lost'}"
        self._heard.put_nowait(EnvError(f"the environment at {self._url} is lost: {why}"))


async def connected(url: str, *, headers: Mapping[str, str], max_message_bytes: int) -> Line:
    """A WebSocket to `url`, as soon as there is one. Raises EnvError where the server will not have this client."""
    while True:
        session = aiohttp.ClientSession(headers=headers)
        try:
            socket = await session.ws_connect(url, heartbeat=PING_S, max_msg_size=max_message_bytes, compress=0)
            return Line(session, socket, url)
        except aiohttp.WSServerHandshakeError as error:
            await session.close()
            if error.status != 503:
                cure = f"; set {SECRET_VARIABLE} or `env.options.key_file`" if error.status == 401 else ""
                raise EnvError(f"{url} refuses with status {error.status}{cure}") from None
        except aiohttp.ClientError:  # not up yet, or not up again
            await session.close()
        except BaseException:
            await session.close()
            raise
        await asyncio.sleep(RETRY_S)


@functools.cache
def far_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="far-envs", daemon=True).start()
    return loop
