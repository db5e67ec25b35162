"""A TCP proxy that passes bytes on, or keeps them, as a network does that is cut and mended."""

import asyncio
import contextlib
import threading
from typing import Self

START_TIMEOUT_S = 20.0
PIECE_BYTES = 1 << 14


class StallingProxy:
    """Listens for as long as it is entered."""

    def __init__(self, upstream: str) -> None:
        """`upstream` is a ZeroMQ address, as `endpoint` is."""
        host, _, port = upstream.removeprefix("tcp://").rpartition(":")
        self.endpoint = ""
        self.num_held_bytes = 0  # the witness: bytes that came while nothing was passed on
        self._upstream = (host, int(port))
        self._loop = asyncio.new_event_loop()
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()], daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(START_TIMEOUT_S), "the proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_TIMEOUT_S)
        self._loop.close()

    def stall(self) -> None:
        """Pass nothing on any more, and close nothing."""
        self._loop.call_soon_threadsafe(self._is_whole.clear)

    def mend(self) -> None:
        self._loop.call_soon_threadsafe(self._is_whole.set)

    # --- In the thread of the loop.

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            their_reader, their_writer = await asyncio.open_connection(*self._upstream)
            there = asyncio.create_task(self._pass_on(reader, their_writer))
            back = asyncio.create_task(self._pass_on(their_reader, writer))
            try:
                await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
            finally:
                there.cancel()
                back.cancel()
                their_writer.close()
        writer.close()
        self._tasks.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(PIECE_BYTES):
            if not self._is_whole.is_set():
                self.num_held_bytes += len(piece)
                await self._is_whole.wait()
            writer.write(piece)
            await writer.drain()
