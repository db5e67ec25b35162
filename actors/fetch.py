"""What one source gives of a blob: a few requests in flight, until nothing is missing or there is a reason to leave."""

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash
import zmq

from common.chunks import Answer, Blob, ChunkReply, ChunkRequest, Farewell
from common.curve import CurveKey

WINDOW = 4  # requests in flight; more only fills the server's queue
SILENCE_S = 5.0  # a source sends a chunk a second at least, or is left
LINGER_MS = 500  # for the farewell
MAX_HEADER_BYTES = 4096

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Left(Exception):
    """The source was left before nothing was missing; what has come stays."""


class Full(Left):
    """It serves as many as it may."""


class Gone(Left):
    """It has no such blob."""


class Silent(Left):
    """It says nothing: it is dead, stopped, or cut off, or it does not have the run's key."""


class Corrupt(Left):
    """It sent what it should not have."""


@dataclass(kw_only=True, slots=True)
class PullCounts:
    """What came of the pulls."""

    fetched_bytes: int = 0
    num_corrupt: int = 0  # of chunks, and whole blobs, that were not what they should be


@dataclass(kw_only=True, slots=True)
class Partial:
    """A blob on its way: what has come, and from whom."""

    blob: Blob
    chunk_bytes: int
    buffer: Bytes
    missing: deque[int]  # offsets of chunks
    givers: set[str] = field(default_factory=set)  # endpoints

    def __str__(self) -> str:
        return f"{len(self.missing)} of {-(-self.blob.num_bytes // self.chunk_bytes)} chunks missing"

    def num_bytes(self, offset: int) -> int:
        """Of the chunk there."""
        return min(self.chunk_bytes, self.blob.num_bytes - offset)


def empty_partial(blob: Blob, chunk_bytes: int) -> Partial:
    """Nothing of `blob` yet."""
    return Partial(
        blob=blob,
        chunk_bytes=chunk_bytes,
        buffer=np.empty(blob.num_bytes, dtype=np.uint8),
        missing=deque(range(0, blob.num_bytes, chunk_bytes)),
    )


def draw(
    partial: Partial,
    endpoint: str,
    *,
    context: "zmq.Context[zmq.Socket[bytes]]",
    key: CurveKey | None,
    deadline: float,
    counts: PullCounts,
) -> None:
    """Pull the missing chunks of `partial` from `endpoint`, until the monotonic clock says `deadline`. Raises Left."""
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
                raise Silent(f"{endpoint} has said nothing for {patience_s:.1f} s")
            counts.fetched_bytes += _take(socket.recv_multipart(copy=False), partial, asked, endpoint)
    finally:
        partial.missing.extendleft(reversed(asked))
        with contextlib.suppress(zmq.Again):  # there is no connection
            socket.send(msgspec.msgpack.encode(Farewell()), zmq.NOBLOCK)
        socket.close()


def _connect(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:  # whoever announced it does not know its own address
        raise Silent(f"{endpoint} is nowhere to connect to: {error}") from None


def _ask(socket: "zmq.Socket[bytes]", partial: Partial, offset: int) -> None:
    request = ChunkRequest(root=partial.blob.root, offset=offset, num_bytes=partial.num_bytes(offset))
    try:
        socket.send(msgspec.msgpack.encode(request), zmq.NOBLOCK)
    except zmq.Again:
        raise Silent("it does not let this process in") from None


def _take(frames: list[zmq.Frame], partial: Partial, asked: deque[int], endpoint: str) -> int:
    """Put one reply into its place; return its bytes. Raises Left."""
    if len(frames) != 2:
        raise Corrupt(f"{endpoint}: a reply of {len(frames)} frames, not a header and its bytes")
    data = frames[1].buffer
    try:
        reply = msgspec.msgpack.decode(frames[0].buffer, type=ChunkReply)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{endpoint}: a reply that is not a ChunkReply: {error}") from error
    if reply.root != partial.blob.root or reply.offset not in asked:
        raise Corrupt(f"{endpoint}: a chunk that was not asked for, at {reply.offset}")
    if reply.answer is Answer.FULL:
        raise Full(f"{endpoint} is full")
    if reply.answer is Answer.GONE:
        raise Gone(f"{endpoint}: no longer served; a newer one is")
    if data.nbytes != partial.num_bytes(reply.offset):
        raise Corrupt(f"{endpoint}: chunk at {reply.offset} holds {data.nbytes} bytes, not what was asked for")
    if xxhash.xxh3_64_intdigest(data) != reply.xxh3:
        raise Corrupt(f"{endpoint}: chunk at {reply.offset} does not match its hash")
    partial.buffer.data[reply.offset : reply.offset + data.nbytes] = data
    partial.givers.add(endpoint)
    asked.remove(reply.offset)
    return data.nbytes
