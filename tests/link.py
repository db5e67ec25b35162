"""A proxy of TCP connections that can be cut for a while, for tests of faults."""

import asyncio
import threading
from pathlib import Path
from typing import Self

POLL_S = 0.02
START_TIMEOUT_S = 20.0
CHUNK_BYTES = 1 << 16


class Link:
    """Forwards connections to `port` while its context is entered. Any thread may set its attributes."""

    def __init__(self, port: int, *, listen: Path | None = None) -> None:
        """It listens on a free port of loopback, or on the socket file `listen`."""
        self.is_cut = False  # nothing is forwarded; connections stay open and continue when this is False again
        self.num_held = 0  # pieces that waited because the link was cut
        self.port = 0  # it listens here
        self._upstream, self._listen = port, listen
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._pumps: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise TimeoutError(f"the link has not begun to listen within {START_TIMEOUT_S:.0f} s")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_TIMEOUT_S)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        if self._listen is not None:
            server = await asyncio.start_unix_server(self._connected, self._listen)
        else:
            server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await asyncio.sleep(0)  # lets the transports close

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:  # the server is down: the client must see a closed connection as well
            writer.close()
            return
        for pair in ((reader, forth), (back, writer)):
            pump = asyncio.create_task(self._pump(*pair))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(CHUNK_BYTES):
                if self.is_cut:
                    self.num_held += 1
                    while self.is_cut:  # noqa: ASYNC110 - another thread sets it
                        await asyncio.sleep(POLL_S)
                writer.write(piece)
                await writer.drain()
            writer.close()
        except OSError:  # a fault may kill either end at any time
            writer.close()
        finally:
            if not writer.is_closing():  # cancelled: drop what is still to be written
                writer.transport.abort()
