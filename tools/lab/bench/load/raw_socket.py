"""The minimum that replay is measured against: a bare socket."""

import socket
import time

from slipstream.replay.buffer.bulk import WINDOW
from slipstream.tools.lab.loopback_server import Server

TIMEOUT_S = 60.0
KEYS = [b"payload:%012d" % number for number in range(16)]


class RawSocket:
    """The minimum that a client can do: send and receive bytes, with WINDOW requests in flight."""

    def __init__(self, server: Server, payload: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(b"AUTH %s\r\n" % server.password.encode())
        self._answered(b"+OK\r\n", 1)
        self._payload = payload
        self._into = memoryview(bytearray(1 << 20))

    def set(self, num_payloads: int) -> float:
        """SET that many payloads; return the seconds."""
        started, num_under_way = time.perf_counter(), 0
        for number in range(num_payloads):
            head = b"*3\r\n$3\r\nSET\r\n$20\r\npayload:%012d\r\n$%d\r\n" % (number, len(self._payload))
            self._send([head, self._payload, b"\r\n"])
            num_under_way += 1
            if num_under_way == WINDOW:
                num_under_way -= self._answered(b"+OK\r\n", 1)
        while num_under_way:
            num_under_way -= self._answered(b"+OK\r\n", 1)
        return time.perf_counter() - started

    def get(self, num_payloads: int) -> float:
        """GET that many of KEYS, which must exist; return the seconds. The bytes are received and not read."""
        reply_bytes = len(b"$%d\r\n\r\n" % len(self._payload)) + len(self._payload)
        started, num_sent, num_bytes = time.perf_counter(), 0, 0
        while num_bytes < num_payloads * reply_bytes:
            while num_sent < min(num_payloads, num_bytes // reply_bytes + WINDOW):
                self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$20\r\n%s\r\n" % KEYS[num_sent % len(KEYS)])
                num_sent += 1
            num_bytes += self._socket.recv_into(self._into)
        return time.perf_counter() - started

    def close(self) -> None:
        self._socket.close()

    def _send(self, pieces: list[bytes]) -> None:
        sent = self._socket.sendmsg(pieces)
        if sent < sum(map(len, pieces)):  # the socket's buffer was full: send the rest
            self._socket.sendall(b"".join(pieces)[sent:])

    def _answered(self, reply: bytes, least: int) -> int:
        received = b""
        while len(received) < least * len(reply) or len(received) % len(reply):
            received += self._socket.recv(4096)
        if received != reply * (len(received) // len(reply)):
            raise RuntimeError(f"the server answered {received[:200]!r}")
        return len(received) // len(reply)
