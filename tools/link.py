"""A TCP link on loopback that can be made slow and be cut; clients and server know nothing of it."""

import asyncio
import threading
from typing import Self

POLL_S = 0.02
START_TIMEOUT_S = 20.0
CHUNK_BYTES = 1 << 16


class Link:
    """Passes everything on to `port` for as long as it is entered. Its attributes may be set from any thread."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0  # before each piece of up to CHUNK_BYTES is passed on, either way
        self.is_cut = False  # then nothing is passed on; connections stay, and go on when it is mended
        self.num_held = 0  # pieces that were held up by a cut
        self.port = 0  # where it listens
        self._upstream = port
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._pumps: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise TimeoutError("the link does not listen")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_TIMEOUT_S)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await asyncio.sleep(0)  # in which the transports end

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:  # the server is away: so is whoever is at the other end of a link
            writer.close()
            return
        for pair in ((reader, forth), (back, writer)):
            pump = asyncio.create_task(self._pump(*pair))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.is_cut:
                    self.num_held += 1
                    while self.is_cut:  # noqa: ASYNC110 - another thread mends it
                        await asyncio.sleep(POLL_S)
                writer.write(piece)
                await writer.drain()
            writer.close()
        except OSError:  # either end may be killed at any moment
            writer.close()
        finally:
            if not writer.is_closing():  # cancelled: what is left to write nobody reads
                writer.transport.abort()
