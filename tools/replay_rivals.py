"""What replay is measured against: the bare socket, redis-benchmark, pickles in a stream, Reverb."""

import csv
import pickle  # a rival's wire; no byte of ours goes through it
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from common.trajectory import Trajectory
from replay.bulk import WINDOW
from replay.server import Server

BUILD = Path(__file__).parent.parent / "build"
REVERB_PYTHON = BUILD / "reverb" / "bin" / "python"
REDIS_TOOLS = BUILD / "redis-tools" / "usr"
SETUP = "run `make bench-replay`, which sets it up, or tools/setup_bench_replay.sh"
TIMEOUT_S = 60.0
KEYS = [b"payload:%012d" % number for number in range(16)]


class RivalMissing(RuntimeError):
    """Something to measure against is not there; the message says how to get it."""


class RawSocket:
    """The least that a client could do: bytes out, bytes in, WINDOW requests under way."""

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
        """GET that many of KEYS, which must be there; return the seconds. The bytes are received and not looked at."""
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
        if sent < sum(map(len, pieces)):  # the rest, which the socket had no room for
            self._socket.sendall(b"".join(pieces)[sent:])

    def _answered(self, reply: bytes, least: int) -> int:
        received = b""
        while len(received) < least * len(reply) or len(received) % len(reply):
            received += self._socket.recv(4096)
        if received != reply * (len(received) // len(reply)):
            raise RuntimeError(f"the server answered {received[:200]!r}")
        return len(received) // len(reply)


def as_lists(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as peers pickle theirs: a list of numbers for each array."""
    return {
        **{name: getattr(trajectory, name) for name in trajectory.__struct_fields__},
        "tokens": trajectory.token_array().tolist(),
        "behaviour_logprobs": trajectory.behaviour_logprob_array().tolist(),
        "loss_mask": trajectory.loss_mask_array().tolist(),
    }


class PickledStream:
    """A record as a pickle in a stream's entry, one XADD each; read 16 at a time by a group's consumer."""

    STREAM, GROUP, BATCH = "pickled", "learner", 16

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def insert(self, record: object, num_items: int) -> float:
        """Into a new stream; return the seconds."""
        self._client.delete(self.STREAM)
        self._client.xgroup_create(self.STREAM, self.GROUP, mkstream=True)
        started = time.perf_counter()
        for _ in range(num_items):
            self._client.xadd(self.STREAM, {"record": pickle.dumps(record)})
        return time.perf_counter() - started

    def sample(self, num_items: int) -> float:
        """All that was inserted, acknowledged; return the seconds."""
        started, num_read = time.perf_counter(), 0
        while num_read < num_items:
            reply: Any = self._client.xreadgroup(self.GROUP, "consumer", {self.STREAM: ">"}, count=self.BATCH)
            ((_, entries),) = reply
            for _, fields in entries:
                pickle.loads(fields[b"record"])
            self._client.xack(self.STREAM, self.GROUP, *[entry for entry, _ in entries])
            num_read += len(entries)
        return time.perf_counter() - started


class Reverb:
    """A Reverb server and its client, each a process of its own, as Redis and ours are."""

    def __init__(self, payload: Path) -> None:
        """`payload` holds the bytes of an item. Raises RivalMissing."""
        if not REVERB_PYTHON.exists():
            raise RivalMissing(f"there is no Reverb at {REVERB_PYTHON}: {SETUP}")
        self._server = self._start("serve")
        self._client = self._start("drive", self._line(self._server), str(payload))
        self._line(self._client)

    def insert(self, num_items: int, *, window: int) -> float:
        return self._ask(f"insert {num_items} {window}")

    def sample(self, num_items: int) -> float:
        return self._ask(f"sample {num_items}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (self._client, self._server):
            with process:  # closes its input, at which it ends, and waits
                pass

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        script = Path(__file__).parent / "rival_reverb.py"
        return subprocess.Popen(
            [str(REVERB_PYTHON), str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _ask(self, command: str) -> float:
        assert self._client.stdin is not None
        self._client.stdin.write(command + "\n")
        self._client.stdin.flush()
        return float(self._line(self._client))

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise RivalMissing(f"Reverb's process ended (exit {process.wait(TIMEOUT_S)}): try {REVERB_PYTHON} by hand")
        return line


def redis_benchmark(server: Server, num_payloads: int) -> float:
    """GETs per second of KEYS, which must be there, by 50 clients in C without a pipeline: its defaults."""
    found = shutil.which("redis-benchmark") or str(REDIS_TOOLS / "bin" / "redis-benchmark")
    if not Path(found).exists():
        raise RivalMissing(f"there is no redis-benchmark: {SETUP}")
    libraries = next(iter(sorted((REDIS_TOOLS / "lib").glob("*-linux-gnu"))), "")
    ended = subprocess.run(
        # The password is in its arguments, where others see it: of a server that lives for this benchmark alone.
        [found, "-p", str(server.port), "-a", server.password, "-n", str(num_payloads), "-r", str(len(KEYS)), "--csv",
         "GET", "payload:__rand_int__"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={"LD_LIBRARY_PATH": str(libraries)},
    )  # fmt: skip
    rows = list(csv.DictReader(ended.stdout.splitlines()))
    if not rows:
        raise RivalMissing(f"redis-benchmark gave no numbers: {ended.stdout} {ended.stderr}")
    return float(rows[0]["rps"])
