"""Fetches missing chunks of a blob from one source, with a few requests in flight, until it is complete or fails."""

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash
import zmq

from slipstream.common.process.wire import MALFORMED
from slipstream.common.transfer.chunks import Blob, ChunkReply, ChunkRequest, ChunkStatus, Farewell
from slipstream.common.transfer.encryption import CurveKey

WINDOW = 4  # requests in flight; more only fills the server's queue
SILENCE_S = 5.0  # a source that sends nothing for this long has failed
LINGER_MS = 500  # for the farewell
MAX_HEADER_BYTES = 4096

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Left(Exception):
    """The source failed before the blob was complete; the chunks received so far stay."""


class Full(Left):
    """All its places are taken."""


class Gone(Left):
    """It does not have the blob."""


class Silent(Left):
    """It sends nothing: it is dead, suspended or disconnected, or it does not have the run's key."""


class Corrupt(Left):
    """It sent a malformed reply or corrupt bytes."""


@dataclass(kw_only=True, slots=True)
class PullCounts:
    """The counters of all pulls."""

    fetched_bytes: int = 0
    num_corrupt: int = 0  # corrupt chunks and blobs


@dataclass(kw_only=True, slots=True)
class Partial:
    """A partly received blob, and the sources of its chunks; none has been received at first."""

    blob: Blob
    chunk_bytes: int
    buffer: Bytes = field(init=False)
    missing: deque[int] = field(init=False)  # offsets of chunks
    givers: set[str] = field(default_factory=set)  # endpoints

    def __post_init__(self) -> None:
        self.buffer = np.empty(self.blob.num_bytes, dtype=np.uint8)
        self.missing = deque(range(0, self.blob.num_bytes, self.chunk_bytes))

    def __str__(self) -> str:
        return f"{len(self.missing)} of {-(-self.blob.num_bytes // self.chunk_bytes)} chunks missing"

    def num_bytes(self, offset: int) -> int:
        """The size of the chunk at `offset`."""
        return min(self.chunk_bytes, self.blob.num_bytes - offset)

    def split(self, chunk_bytes: int) -> None:
        """Ask for what is missing in smaller chunks from now on."""
        ends = [(offset, offset + self.num_bytes(offset)) for offset in self.missing]
        self.missing = deque(piece for offset, end in ends for piece in range(offset, end, chunk_bytes))
        self.chunk_bytes = chunk_bytes


def fetch(
    partial: Partial,
    endpoint: str,
    *,
    context: "zmq.Context[zmq.Socket[bytes]]",
    key: CurveKey | None,
    deadline: float,
    counts: PullCounts,
) -> None:
    """Fetch the missing chunks of `partial` from `endpoint`. Raises Left.

    `deadline` is a time of the monotonic clock.
    """
    asked: deque[int] = deque()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, partial.chunk_bytes + MAX_HEADER_BYTES)
        if key is not None:
            key.guard_client(socket)
        _connect(socket, endpoint)
        while partial.missing or asked:
            while partial.missing and len(asked) < WINDOW:
                asked.append(partial.missing.popleft())
                _ask(socket, partial, asked[-1])
            patience_s = max(min(SILENCE_S, deadline - time.monotonic()), 0.0)
            if not socket.poll(int(patience_s * 1000)):
                raise Silent(f"{endpoint} has sent nothing for {patience_s:.1f} s")
            counts.fetched_bytes += _take(socket.recv_multipart(copy=False), partial, asked, endpoint)
    finally:
        partial.missing.extendleft(reversed(asked))
        with contextlib.suppress(zmq.Again):  # the connection was never made
            socket.send(msgspec.msgpack.encode(Farewell()), zmq.NOBLOCK)
        socket.close()


def _connect(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:  # its notice contains a malformed address
        raise Silent(f"{endpoint} is not an address to connect to: {error}") from None


def _ask(socket: "zmq.Socket[bytes]", partial: Partial, offset: int) -> None:
    request = ChunkRequest(root=partial.blob.root, offset=offset, num_bytes=partial.num_bytes(offset))
    try:
        socket.send(msgspec.msgpack.encode(request), zmq.NOBLOCK)
    except zmq.Again:
        raise Silent("it did not accept the connection; is `weights.key_file` the same on both hosts?") from None


def _take(frames: list[zmq.Frame], partial: Partial, asked: deque[int], endpoint: str) -> int:
    """Store the chunk in one reply; return its size. Raises Left."""
    if len(frames) != 2:
        raise Corrupt(f"{endpoint}: a reply of {len(frames)} frames, expected a header and its bytes")
    data = frames[1].buffer
    try:
        reply = msgspec.msgpack.decode(frames[0].buffer, type=ChunkReply)
    except MALFORMED as error:
        raise Corrupt(f"{endpoint}: a reply that is not a ChunkReply: {error}") from error
    if reply.root != partial.blob.root or reply.offset not in asked:
        raise Corrupt(f"{endpoint}: a chunk at {reply.offset} that was not requested")
    if reply.answer is ChunkStatus.FULL:
        raise Full(f"{endpoint} is full")
    if reply.answer is ChunkStatus.GONE:
        raise Gone(f"{endpoint} does not serve this blob any more; there is a newer version")
    if data.nbytes != partial.num_bytes(reply.offset):
        raise Corrupt(
            f"{endpoint}: the chunk at {reply.offset} has {data.nbytes} bytes, expected "
            f"{partial.num_bytes(reply.offset)}"
        )
    if xxhash.xxh3_64_intdigest(data) != reply.xxh3:
        raise Corrupt(f"{endpoint}: the chunk at {reply.offset} does not match its hash")
    partial.buffer.data[reply.offset : reply.offset + data.nbytes] = data
    partial.givers.add(endpoint)
    asked.remove(reply.offset)
    return data.nbytes
