"""What serves the chunks of blobs to whoever pulls them: a publisher's, and a relay's."""

import logging
import threading
from collections.abc import Callable

import msgspec
import zmq

from common.chunks import ChunkReply, ChunkRequest
from common.config import MAX_CHUNK_BYTES

MAX_REQUEST_BYTES = 4096
POLL_MS = 100

log = logging.getLogger(__name__)


class ChunkServer:
    """Answers requests by a thread of its own, until it is closed."""

    def __init__(self, host: str, read: Callable[[ChunkRequest], bytes | None]) -> None:
        """Bind to a free port of `host`. `read` returns the bytes asked for; None when there is no such blob."""
        self._read = read
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.LINGER, 0)
        port: int = self._router.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._closing = threading.Event()
        self._serving = threading.Thread(target=self._serve, name="serve-chunks", daemon=True)
        self._serving.start()

    def close(self) -> None:
        """Let go of the port. Idempotent."""
        self._closing.set()
        self._serving.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._closing.is_set():
            if self._router.poll(POLL_MS):
                self._answer()

    def _answer(self) -> None:
        peer, *frames = self._router.recv_multipart()
        try:
            request = msgspec.msgpack.decode(frames[-1], type=ChunkRequest)
        except (msgspec.MsgspecError, IndexError) as error:
            log.warning("a request that is not a ChunkRequest: %s", error)
            return
        if request.offset < 0 or not 0 < request.num_bytes <= MAX_CHUNK_BYTES:
            log.warning("a request out of range: %s", request)
            return
        chunk = self._read(request)
        header = ChunkReply(root=request.root, offset=request.offset, gone=chunk is None)
        self._router.send_multipart([peer, msgspec.msgpack.encode(header), chunk or b""])
