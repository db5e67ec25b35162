"""What serves the chunks of blobs to whoever pulls them: a publisher's, and a relay's."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import xxhash
import zmq

from common.chunks import Answer, ChunkReply, ChunkRequest, Farewell, Request
from common.curve import CurveKey

MAX_REQUEST_BYTES = 4096
MAX_WAITING = 16  # requests of one receiver that are kept; it has no reason for more than a few
MAX_UNSENT = 4  # chunks of one receiver in ZeroMQ's hands
IDLE_S = 5.0  # a receiver that asks for nothing and takes nothing for this long has lost its place
POLL_MS = 100
BLOCKED_POLL_S = 0.02  # ZeroMQ does not tell when a receiver takes chunks again

log = logging.getLogger(__name__)

Read = Callable[[ChunkRequest], bytes | memoryview | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """What one server gives."""

    fan_out: int  # receivers at a time
    bytes_per_s: int  # to each of them; 0 is no limit
    chunk_bytes: int  # at once


@dataclass(kw_only=True, slots=True)
class ServerLoad:
    """What a server does, and has done."""

    num_children: int = 0  # receivers that have a place now
    served_bytes: int = 0
    num_turned_away: int = 0  # requests answered with FULL


@dataclass(kw_only=True, slots=True)
class _Child:
    """A receiver that has a place."""

    waiting: deque[ChunkRequest] = field(default_factory=deque)
    moved_at: float  # it last asked for a chunk, or took one
    next_at: float = 0.0  # not before this it gets another chunk


class ChunkServer:
    """Answers requests by a thread of its own, until it is closed.

    Receivers are served in turn, a chunk each, so that none gets more than another by asking for more; one that takes
    nothing keeps MAX_UNSENT chunks in memory, and nobody waiting.
    """

    def __init__(self, host: str, read: Read, *, limits: ServerLimits, key: CurveKey | None) -> None:
        """Bind to a free port of `host`. `read` returns the bytes asked for; None when there is no such blob."""
        self.load = ServerLoad()
        self._read = read
        self._limits = limits
        self._children: dict[bytes, _Child] = {}
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what a receiver does not take is dropped in silence
        self._router.setsockopt(zmq.LINGER, 0)
        self._gate = key.guard_server(self._router, self._context) if key else None
        port: int = self._router.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        if key is None and not host.startswith("127."):
            log.warning("whoever reaches %s may pull what is served there; `slipstream key` makes a key", self.endpoint)
        self._closing = threading.Event()
        self._serving = threading.Thread(target=self._serve, name="serve-chunks", daemon=True)
        self._serving.start()

    @property
    def alive(self) -> bool:
        """False once it has failed, or was closed."""
        return self._serving.is_alive()

    def close(self) -> None:
        """Let go of the port. Idempotent."""
        self._closing.set()
        self._serving.join()
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._closing.is_set():
            if self._router.poll(self._patience_ms()):
                self._hear(*self._router.recv_multipart())
            now = time.monotonic()
            for peer, child in list(self._children.items()):
                if child.moved_at < now - IDLE_S:
                    self._forget(peer)
                elif child.waiting and child.next_at <= now:
                    self._send_chunk(peer, child)

    def _patience_ms(self) -> int:
        """How long nothing can be sent, if nobody asks."""
        now = time.monotonic()
        pauses_s = [child.next_at - now for child in self._children.values() if child.waiting]
        return max(0, min(POLL_MS, *(math.ceil(1000 * pause_s) for pause_s in pauses_s))) if pauses_s else POLL_MS

    def _hear(self, peer: bytes, *frames: bytes) -> None:
        try:
            request = msgspec.msgpack.decode(frames[-1], type=Request)
        except (msgspec.MsgspecError, IndexError) as error:
            log.warning("a request that is none: %s", error)
            return
        match request:
            case Farewell():
                self._forget(peer)
            case ChunkRequest(offset=offset, num_bytes=num_bytes):
                if offset < 0 or not 0 < num_bytes <= self._limits.chunk_bytes:
                    log.warning("a request out of range, of chunks of %d bytes: %s", self._limits.chunk_bytes, request)
                    return
                self._admit(peer, request)

    def _admit(self, peer: bytes, request: ChunkRequest) -> None:
        child = self._children.get(peer)
        if child is None:
            if len(self._children) >= self._limits.fan_out:
                self.load.num_turned_away += 1
                self._send(peer, request, Answer.FULL, b"")
                return
            child = self._children[peer] = _Child(moved_at=time.monotonic())
            self.load.num_children = len(self._children)
        if len(child.waiting) < MAX_WAITING and request not in child.waiting:
            child.waiting.append(request)
            child.moved_at = time.monotonic()

    def _send_chunk(self, peer: bytes, child: _Child) -> None:
        request = child.waiting[0]
        try:
            # Before the bytes are read: it is here that ZeroMQ says whether the receiver takes them.
            self._router.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            child.next_at = time.monotonic() + BLOCKED_POLL_S
            return
        except zmq.ZMQError:  # EHOSTUNREACH: its connection has ended
            self._forget(peer)
            return
        chunk = self._read(request)
        child.waiting.popleft()
        child.moved_at = now = time.monotonic()
        if chunk is None:
            self._send_rest(request, Answer.GONE, b"")
            return
        self.load.served_bytes += len(chunk)  # before they are on their way: who has them may look at once
        if self._limits.bytes_per_s:
            child.next_at = max(child.next_at, now) + len(chunk) / self._limits.bytes_per_s
        self._send_rest(request, Answer.HERE, chunk)

    def _send(self, peer: bytes, request: ChunkRequest, answer: Answer, data: bytes) -> None:
        """To one who has no place; an answer that it does not take is lost, as it may ask again."""
        try:
            self._router.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        self._send_rest(request, answer, data)

    def _send_rest(self, request: ChunkRequest, answer: Answer, data: bytes | memoryview) -> None:
        header = ChunkReply(
            root=request.root, offset=request.offset, answer=answer, xxh3=xxhash.xxh3_64_intdigest(data)
        )
        self._router.send(msgspec.msgpack.encode(header), zmq.SNDMORE)
        self._router.send(data, copy=False)

    def _forget(self, peer: bytes) -> None:
        self._children.pop(peer, None)
        self.load.num_children = len(self._children)
