"""How a blob is pulled: chunk by chunk, a few in flight, only the missing ones asked for again."""

import time
from collections import deque

import msgspec
import zmq

from common.chunks import Blob, ChunkReply, ChunkRequest

WINDOW = 4  # requests in flight; more only fills the server's queue
RETRY_S = 1.0  # chunks that were asked for and did not come in this time are asked for again
SILENCE_S = 10.0  # a server answers in milliseconds; one that says nothing for this long is gone
MAX_HEADER_BYTES = 4096


class PullFailed(RuntimeError):
    """The blob is no longer served, or did not come in time."""


def pull(
    context: "zmq.Context[zmq.Socket[bytes]]",
    endpoint: str,
    blob: Blob,
    view: memoryview,
    *,
    chunk_bytes: int,
    timeout_s: float,
) -> None:
    """Fill `view`, of `blob.num_bytes`, from the server at `endpoint`. Raises PullFailed."""
    deadline = time.monotonic() + timeout_s
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, chunk_bytes + MAX_HEADER_BYTES)
        socket.connect(endpoint)
        under_way = _Pull(socket, blob, view, chunk_bytes)
        while not under_way.done:
            if time.monotonic() > deadline:
                raise PullFailed(f"{under_way} at the deadline")
            under_way.turn()


class _Pull:
    """One blob on its way over one socket: which chunks wait, which are asked for, which have come."""

    def __init__(self, socket: "zmq.Socket[bytes]", blob: Blob, view: memoryview, chunk_bytes: int) -> None:
        self._socket = socket
        self._blob = blob
        self._view = view
        self._chunk_bytes = chunk_bytes
        self._waiting = deque(range(0, blob.num_bytes, chunk_bytes))
        self._asked: set[int] = set()
        self._last_reply = time.monotonic()

    def __str__(self) -> str:
        missing = len(self._waiting) + len(self._asked)
        return f"{missing} of {-(-self._blob.num_bytes // self._chunk_bytes)} chunks missing"

    @property
    def done(self) -> bool:
        return not self._waiting and not self._asked

    def turn(self) -> None:
        """Fill the window, then take one reply; after RETRY_S without any, forget what was asked for.

        Raises PullFailed after SILENCE_S without any: the publisher is gone, and a new one may have made its offer.
        """
        while self._waiting and len(self._asked) < WINDOW:
            self._ask(self._waiting.popleft())
        if self._socket.poll(int(RETRY_S * 1000)):
            self._take([frame.buffer for frame in self._socket.recv_multipart(copy=False)])
            self._last_reply = time.monotonic()
        elif time.monotonic() - self._last_reply > SILENCE_S:
            raise PullFailed(f"{self}, no answer for {SILENCE_S:.0f} s")
        else:
            self._waiting.extendleft(sorted(self._asked, reverse=True))
            self._asked.clear()

    def _ask(self, offset: int) -> None:
        request = ChunkRequest(root=self._blob.root, offset=offset, num_bytes=self._num_bytes(offset))
        self._asked.add(offset)
        self._socket.send(msgspec.msgpack.encode(request))

    def _num_bytes(self, offset: int) -> int:
        return min(self._chunk_bytes, self._blob.num_bytes - offset)

    def _take(self, frames: list[memoryview]) -> None:
        reply = _reply(frames)
        if reply.root != self._blob.root or reply.offset not in self._asked:
            return  # a chunk that was asked for twice
        if reply.gone:
            raise PullFailed("no longer served; a newer version is")
        if frames[1].nbytes != self._num_bytes(reply.offset):
            raise PullFailed(f"chunk at {reply.offset} holds {frames[1].nbytes} bytes, not what was asked for")
        self._view[reply.offset : reply.offset + frames[1].nbytes] = frames[1]
        self._asked.remove(reply.offset)


def _reply(frames: list[memoryview]) -> ChunkReply:
    if len(frames) != 2:
        raise PullFailed(f"a reply of {len(frames)} frames, not a header and its bytes")
    try:
        return msgspec.msgpack.decode(frames[0], type=ChunkReply)
    except msgspec.MsgspecError as error:
        raise PullFailed(f"a reply that is not a ChunkReply: {error}") from error
