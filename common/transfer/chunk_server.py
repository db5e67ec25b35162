"""Serves chunks of blobs to receivers: part of the publisher, and of each relay."""

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

from slipstream.common.process.wire import MALFORMED, WireError
from slipstream.common.transfer.chunks import CHUNK_BYTES, ChunkReply, ChunkRequest, ChunkStatus, Farewell, Request
from slipstream.common.transfer.encryption import CurveKey

MAX_REQUEST_BYTES = 4096
MAX_WAITING = 16  # queued requests of one receiver; a receiver needs only a few
MAX_UNSENT = 4  # chunks of one receiver in ZeroMQ's queue
IDLE_S = 5.0  # a receiver that takes no whole chunk, or no LEAST_BYTES of a larger one, in this time loses its place
LEAST_BYTES = 1 << 18
BARRED_S = 60.0  # after that, its connection gets no place for this long; an honest receiver opens a new connection
LOG_EVERY_S = 5.0  # malformed requests are all counted, but logged at most this often
POLL_MS = 100
BLOCKED_POLL_S = 0.02  # ZeroMQ does not report when a receiver takes chunks again

log = logging.getLogger(__name__)

Read = Callable[[ChunkRequest], bytes | memoryview | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """The limits of one server."""

    fan_out: int = 8  # receivers at a time
    chunk_bytes: int = CHUNK_BYTES  # the most in one request


@dataclass(kw_only=True, slots=True)
class ServerLoad:
    """The current load and the counters of a server."""

    num_children: int = 0  # receivers that have a place now
    served_bytes: int = 0
    num_turned_away: int = 0  # requests answered with FULL
    num_malformed: int = 0  # messages that are not requests, or ask for bytes out of range


@dataclass(kw_only=True, slots=True)
class _Child:
    """A receiver with a place."""

    waiting: deque[ChunkRequest] = field(default_factory=deque)
    moved_at: float  # when it got its place, or last finished taking the bytes of a chunk
    taken_bytes: int = 0  # since then
    next_at: float = 0.0  # when it is tried again, after it could take nothing


class ChunkServer:
    """Answers requests with a thread of its own, until it is closed.

    Receivers are served in turn, one chunk each, so that none gets a larger share by sending more requests. A receiver
    that takes nothing costs the memory of MAX_UNSENT chunks, and delays no other receiver.
    """

    def __init__(self, host: str, read: Read, *, limits: ServerLimits, key: CurveKey | None) -> None:
        """Bind to a free port of `host`. `read` returns the requested bytes, or None if there is no such blob."""
        self.load = ServerLoad()
        self._read = read
        self._limits = limits
        self._children: dict[bytes, _Child] = {}
        self._barred_until: dict[bytes, float] = {}  # connections that lost their place
        self._log_at = 0.0
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # otherwise ZeroMQ drops chunks that a receiver does not take
        self._router.setsockopt(zmq.LINGER, 0)
        self._authenticator = key.guard_server(self._router, self._context) if key else None
        port: int = self._router.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        if key is None and not host.startswith("127."):
            log.warning(
                "no authentication: any client that can connect to %s may pull the weights; `slipstream access key` "
                "makes a key for weights.key_file",
                self.endpoint,
            )
        self._closing = threading.Event()
        self._serving = threading.Thread(target=self._serve, name="serve-chunks", daemon=True)
        self._serving.start()

    @property
    def alive(self) -> bool:
        """False after it has failed or was closed."""
        return self._serving.is_alive()

    def close(self) -> None:
        """Stop serving and release the port. Idempotent."""
        self._closing.set()
        self._serving.join()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._closing.is_set():
            if self._router.poll(self._patience_ms()):
                self._hear(*self._router.recv_multipart(copy=False))
            now = time.monotonic()
            self._barred_until = {peer: until for peer, until in self._barred_until.items() if until > now}
            for peer, child in list(self._children.items()):
                if child.moved_at < now - IDLE_S:
                    self._forget(peer)
                    self._barred_until[peer] = now + BARRED_S
                elif child.waiting and child.next_at <= now:
                    self._send_chunk(peer, child)

    def _patience_ms(self) -> int:
        """The time until the next chunk may be sent, if no request arrives before."""
        now = time.monotonic()
        pauses_s = [child.next_at - now for child in self._children.values() if child.waiting]
        return max(0, min(POLL_MS, *(math.ceil(1000 * pause_s) for pause_s in pauses_s))) if pauses_s else POLL_MS

    def _hear(self, peer: zmq.Frame, *frames: zmq.Frame) -> None:
        try:
            match _request(frames, chunk_bytes=self._limits.chunk_bytes):
                case Farewell():
                    self._forget(peer.bytes)
                case ChunkRequest() as request:
                    self._admit(peer.bytes, request)
        except WireError as error:
            self.load.num_malformed += 1
            if time.monotonic() >= self._log_at:
                self._log_at = time.monotonic() + LOG_EVERY_S
                log.warning(
                    "%d malformed requests so far; the last one, from %s: %s",
                    self.load.num_malformed,
                    _sender(peer),
                    error,
                )

    def _admit(self, peer: bytes, request: ChunkRequest) -> None:
        child = self._children.get(peer)
        if child is None:
            if len(self._children) >= self._limits.fan_out or peer in self._barred_until:
                self._turn_away(peer, request)
                return
            child = self._children[peer] = _Child(moved_at=time.monotonic())
            self.load.num_children = len(self._children)
        if len(child.waiting) < MAX_WAITING and request not in child.waiting:
            child.waiting.append(request)

    def _send_chunk(self, peer: bytes, child: _Child) -> None:
        request = child.waiting[0]
        try:
            # Sent before the bytes are read: ZeroMQ reports here whether the receiver takes them.
            self._router.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            child.next_at = time.monotonic() + BLOCKED_POLL_S
            return
        except zmq.ZMQError:  # EHOSTUNREACH: its connection has ended
            self._forget(peer)
            return
        chunk = self._read(request)
        child.waiting.popleft()
        if not chunk:
            self._send_rest(request, ChunkStatus.GONE, b"")
            return
        now = time.monotonic()
        child.taken_bytes += len(chunk)
        if child.taken_bytes >= min(self._limits.chunk_bytes, LEAST_BYTES):
            child.moved_at, child.taken_bytes = now, 0
        self.load.served_bytes += len(chunk)  # before sending: a receiver may read this counter as soon as it has them
        self._send_rest(request, ChunkStatus.HERE, chunk)

    def _turn_away(self, peer: bytes, request: ChunkRequest) -> None:
        """Answer a receiver that has no place. An answer that it does not take is lost; it may ask again."""
        self.load.num_turned_away += 1
        try:
            self._router.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        self._send_rest(request, ChunkStatus.FULL, b"")

    def _send_rest(self, request: ChunkRequest, answer: ChunkStatus, data: bytes | memoryview) -> None:
        header = ChunkReply(
            root=request.root, offset=request.offset, answer=answer, xxh3=xxhash.xxh3_64_intdigest(data)
        )
        self._router.send(msgspec.msgpack.encode(header), zmq.SNDMORE)
        self._router.send(data, copy=False)

    def _forget(self, peer: bytes) -> None:
        self._children.pop(peer, None)
        self.load.num_children = len(self._children)


def _sender(peer: zmq.Frame) -> str:
    """The address of a message's sender, and ZeroMQ's name of the connection."""
    try:
        return f"{peer.get('Peer-Address')} ({peer.bytes.hex()})"
    except zmq.ZMQError:  # ZeroMQ has no address for a connection that has ended
        return f"a connection that has ended ({peer.bytes.hex()})"


def _request(frames: tuple[zmq.Frame, ...], *, chunk_bytes: int) -> Request:
    """The request in a message. Raises WireError if the message is malformed or asks for bytes out of range."""
    if len(frames) != 1:
        raise WireError(f"a message of {len(frames)} frames; a request has one")
    try:
        request: Request = msgspec.msgpack.decode(frames[0].buffer, type=Request)
    except MALFORMED as error:
        raise WireError(f"not a request: {error}") from error
    if isinstance(request, ChunkRequest) and request.num_bytes > chunk_bytes:
        raise WireError(f"a request for more than a chunk of {chunk_bytes} bytes: {request}")
    return request
