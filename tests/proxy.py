"""A proxy between clients and a Redis server that does, on command, what networks do; it counts what it did.

It speaks RESP2: requests go through one at a time, each with its reply, so that a fault strikes a chosen command of a
pipeline as well. The handshake of a connection (AUTH, CLIENT, ...) is passed on and never judged.
"""

import asyncio
import contextlib
import enum
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

HANDSHAKE = {b"AUTH", b"CLIENT", b"HELLO", b"PING", b"SELECT", b"COMMAND", b"INFO", b"CLUSTER"}
START_TIMEOUT_S = 20.0


class Fault(enum.Enum):
    """What becomes of one request."""

    NONE = "none"
    """It is passed on, and so is its reply."""
    LOSE_REPLY = "lose_reply"
    """It is executed; the connection closes instead of a reply."""
    WITHHOLD_REPLY = "withhold_reply"
    """It is executed; the connection stays open and says nothing any more."""
    SWALLOW = "swallow"
    """It never arrives, and the connection says nothing any more."""
    RESET = "reset"
    """It never arrives, and the connection is reset."""
    DUPLICATE = "duplicate"
    """It arrives twice; the client hears the second reply, as after a retry."""


Judge = Callable[[list[bytes]], Fault]


class Proxy:
    """Listens for as long as it is entered. Its attributes may be set from any thread at any time."""

    def __init__(self, upstream_port: int) -> None:
        """Listen on a free port of 127.0.0.1; the server is there too."""
        self.judge: Judge = harmless
        self.done: Counter[Fault] = Counter()  # the witness: one for each request that was dealt with
        self.num_held = 0  # requests that wait, or waited, while it was cut off
        self.port = 0
        self._upstream_port = upstream_port
        self._loop = asyncio.new_event_loop()
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(START_TIMEOUT_S), "the proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_TIMEOUT_S)

    def url(self, password: str) -> str:
        """Of the proxy, for a client."""
        return f"redis://:{password}@127.0.0.1:{self.port}/0"

    def cut_off(self) -> None:
        """Pass nothing on any more. What comes in is delivered once the link is mended, also for clients long gone."""
        self._loop.call_soon_threadsafe(self._is_whole.clear)

    def mend(self) -> None:
        self._loop.call_soon_threadsafe(self._is_whole.set)

    # --- In the thread of the loop.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._stop = asyncio.Event()
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        # The other side may be killed at any moment: that is what tests are about.
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            await self._relay(reader, writer)
        writer.close()
        self._connections.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies, server = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        try:
            while True:
                frame, arguments = await _read_request(reader)
                if arguments[0].upper() in HANDSHAKE:
                    writer.write(await _ask(replies, server, frame))
                    continue
                if not self._is_whole.is_set():
                    self.num_held += 1
                    await self._is_whole.wait()
                fault = self.judge(arguments)
                if fault in (Fault.SWALLOW, Fault.RESET):
                    self.done[fault] += 1
                    await _end(fault, reader, writer)
                    return
                reply = await _ask(replies, server, frame)
                if fault is Fault.DUPLICATE:
                    reply = await _ask(replies, server, frame)
                self.done[fault] += 1
                if fault in (Fault.LOSE_REPLY, Fault.WITHHOLD_REPLY):
                    await _end(fault, reader, writer)
                    return
                writer.write(reply)
                await writer.drain()
        finally:
            server.close()


def harmless(_request: list[bytes]) -> Fault:
    return Fault.NONE


class Nth:
    """The fault strikes one request: the one that comes after `nth` others, of command `only` if it is given."""

    def __init__(self, fault: Fault, *, nth: int = 0, only: bytes = b"") -> None:
        self._fault = fault
        self._only = only
        self._to_pass = nth

    def __call__(self, request: list[bytes]) -> Fault:
        if self._only and request[0].upper() != self._only:
            return Fault.NONE
        self._to_pass -= 1
        return self._fault if self._to_pass == -1 else Fault.NONE


async def _end(fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close the connection in the way of the fault; one that only falls silent lasts until the client gives up."""
    if fault is Fault.RESET:
        connection: Any = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    elif fault in (Fault.SWALLOW, Fault.WITHHOLD_REPLY):
        while await reader.read(1 << 16):
            pass


async def _ask(replies: asyncio.StreamReader, server: asyncio.StreamWriter, frame: bytes) -> bytes:
    server.write(frame)
    await server.drain()
    return await _read_reply(replies)


async def _read_request(reader: asyncio.StreamReader) -> tuple[bytes, list[bytes]]:
    """An array of bulk strings, raw and apart."""
    head = await _read_line(reader)
    frame, arguments = [head], []
    for _ in range(int(head[1:])):
        size = await _read_line(reader)
        body = await reader.readexactly(int(size[1:]) + 2)
        frame += [size, body]
        arguments.append(body[:-2])
    return b"".join(frame), arguments


async def _read_reply(reader: asyncio.StreamReader) -> bytes:
    """One whole reply, raw."""
    line = await _read_line(reader)
    kind, number = line[:1], line[1:]
    if kind == b"$" and int(number) >= 0:
        return line + await reader.readexactly(int(number) + 2)
    if kind == b"*" and int(number) > 0:
        return line + b"".join([await _read_reply(reader) for _ in range(int(number))])
    return line


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError
    return line
