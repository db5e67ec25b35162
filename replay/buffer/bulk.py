"""The buffer's two hot calls, without redis-py's pipeline and parser: store and commit payloads, and read payloads.

Connections come from the client's own pool, so address, password, TLS, timeouts and retries are the client's. After an
error the connection is closed, and the call is retried on a new one, from the first request without a reply. So every
request must be idempotent.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import redis

from slipstream.common.process.connection import CALL_TIMEOUT_S
from slipstream.common.process.redis_retry import passes, patiently
from slipstream.common.process.wire import WireError

WINDOW = 4  # requests in flight: the server has the next one while a reply travels
REQUEST_NAMES = 4  # payloads in one read request: the server replies after it has found all of them
READ_AHEAD = 2  # read requests in flight: the server works on one while the payloads of another are decoded
CHUNK_BYTES = 1 << 20  # of each thread's receive buffer; a larger payload gets a buffer of its own
LINE_BYTES = 64  # enough for the line that declares a payload
MAX_LINE_BYTES = 1 << 16

T = TypeVar("T")
Payload = memoryview | WireError | None
"""What was read: the bytes, or the reason for refusing them, or None for a missing key."""


class Bulk:
    """The bulk path of one client. Threads may share it."""

    def __init__(self, client: redis.Redis, *, max_bytes: int) -> None:
        """Payloads larger than `max_bytes` are refused."""
        self._client = client
        self._max_bytes = max_bytes
        self._thread = threading.local()

    def exchange(self, requests: Iterable[bytes], *, num_replies: int) -> list[list[Any]]:
        """Send the requests, WINDOW at a time; return the `num_replies` replies of each, with errors as values.

        Raises what `requests` raises, and what the client raises when the server does not answer in time.
        """
        replies: list[list[Any]] = []
        to_send, unanswered = iter(requests), deque[bytes]()

        def talk(connection: Any) -> None:
            for request in unanswered:  # on a connection that was lost
                _send(connection, request)
            while True:
                for request in itertools.islice(to_send, WINDOW - len(unanswered)):
                    unanswered.append(request)
                    _send(connection, request)
                if not unanswered:
                    return
                replies.append([_reply(connection) for _ in range(num_replies)])
                unanswered.popleft()

        self._on_a_connection(talk)
        return replies

    def read(self, names: Sequence[str], use: Callable[[int, Payload], T]) -> list[T]:
        """Call `use` with the index and the payload of each name; return its results.

        The next payloads arrive meanwhile. Each one overwrites the memory of the one before it.
        """
        if not hasattr(self._thread, "chunk"):
            self._thread.chunk = bytearray(CHUNK_BYTES)
        used: list[T] = []

        def talk(connection: Any) -> None:
            to_ask = iter([names[at : at + REQUEST_NAMES] for at in range(len(used), len(names), REQUEST_NAMES)])

            def ask(num_requests: int) -> None:
                for request in itertools.islice(to_ask, num_requests):
                    _send(connection, packed(("MGET", *request)))

            ask(READ_AHEAD)
            # redis-py has no public access to the socket, and no public function from an error reply to its class.
            receiver = _Receiver(connection._sock, self._thread.chunk)
            while len(used) < len(names):
                head = receiver.head()
                if head.startswith(b"-"):
                    raise connection._parser.parse_error(head[1:].decode(errors="replace"))
                for _ in range(_size(head, b"*")):
                    used.append(use(len(used), receiver.payload(max_bytes=self._max_bytes)))
                ask(1)

        if names:
            self._on_a_connection(talk)
        return used

    def _on_a_connection(self, talk: Callable[[Any], T]) -> T:
        def attempt() -> T:
            pool = self._client.connection_pool
            connection: Any = pool.get_connection()
            try:
                return talk(connection)
            except BaseException:
                connection.disconnect()  # replies that no call will read may be in flight
                raise
            finally:
                pool.release(connection)

        return patiently(self._client, attempt)


def packed(*commands: Sequence[bytes | str | int]) -> bytes:
    """The commands in Redis's wire format, one after another. This is the only copy of a payload."""
    pieces = []
    for arguments in commands:
        pieces.append(b"*%d\r\n" % len(arguments))
        for argument in arguments:
            data = argument if isinstance(argument, bytes) else str(argument).encode()
            pieces += (b"$%d\r\n" % len(data), data, b"\r\n")
    return b"".join(pieces)


def _send(connection: Any, request: bytes) -> None:
    """Send without redis-py's health check: its reply would come after the replies in flight."""
    connection.send_packed_command([request], check_health=False)


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        if passes(error):
            raise
        return error


class _Receiver:
    """Receives replies from a socket, one payload at a time, into one buffer."""

    def __init__(self, sock: Any, chunk: bytearray) -> None:
        self._sock = sock
        self._first = self._chunk = chunk
        self._start = self._stop = 0  # of the bytes that were received and not taken yet
        self._deadline = 0.0

    def head(self) -> bytes:
        """The first line of a reply or of one of its payloads. This overwrites what was taken before."""
        self._deadline = time.monotonic() + CALL_TIMEOUT_S
        self._move_to(self._first)
        return self._line()

    def payload(self, *, max_bytes: int) -> Payload:
        """The next bulk string. One that declares more than `max_bytes` is skipped without being stored."""
        num_bytes = _size(self.head(), b"$")
        if num_bytes < 0:
            return None
        if num_bytes > max_bytes:
            self._skip(num_bytes + 2)
            return WireError(f"{num_bytes} bytes, the limit is {max_bytes}")
        self._receive(num_bytes + 2)
        taken = memoryview(self._chunk)[self._start : self._start + num_bytes]
        self._start += num_bytes + 2
        return taken

    def _line(self) -> bytes:
        """The bytes before the next CRLF. The CRLF is taken too."""
        while (end := self._chunk.find(b"\r\n", self._start, self._stop)) < 0:
            if self._stop - self._start > MAX_LINE_BYTES:
                raise redis.InvalidResponse(f"a line of more than {MAX_LINE_BYTES} bytes")
            self._receive(self._stop - self._start + 1)
        taken = bytes(self._chunk[self._start : end])
        self._start = end + 2
        return taken

    def _receive(self, num_bytes: int) -> None:
        """Receive until `num_bytes` are available in one piece, and little more: the surplus may have to be moved."""
        if self._start + num_bytes + LINE_BYTES > len(self._chunk):
            self._move_to(bytearray(num_bytes + LINE_BYTES))
        while (num_missing := num_bytes - (self._stop - self._start)) > 0:
            self._stop += self._received(memoryview(self._chunk)[self._stop : self._stop + num_missing + LINE_BYTES])

    def _move_to(self, chunk: bytearray) -> None:
        held = self._chunk[self._start : self._stop]
        chunk[: len(held)] = held
        self._chunk, self._start, self._stop = chunk, 0, len(held)

    def _skip(self, num_bytes: int) -> None:
        held = min(num_bytes, self._stop - self._start)
        self._start += held
        scratch = memoryview(bytearray(CHUNK_BYTES))
        while (num_left := num_bytes - held) > 0:
            held += self._received(scratch[:num_left])

    def _received(self, into: memoryview) -> int:
        try:
            num_bytes: int = self._sock.recv_into(into)
        except TimeoutError:
            raise redis.TimeoutError(f"no reply in {CALL_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise redis.ConnectionError(f"the connection was lost: {error}") from error
        if num_bytes == 0:
            raise redis.ConnectionError("the server closed the connection")
        if time.monotonic() > self._deadline:
            raise redis.TimeoutError(f"a payload took longer than {CALL_TIMEOUT_S:.0f} s")
        return num_bytes


def _size(line: bytes, kind: bytes) -> int:
    """The number that `*3` or `$53000` declares. Raises redis.InvalidResponse for any other line."""
    try:
        if line[:1] == kind:
            return int(line[1:])
    except ValueError:
        pass
    raise redis.InvalidResponse(f"expected {kind.decode()} and a size, got {line[:80]!r}")
