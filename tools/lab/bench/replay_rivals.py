"""The systems that replay is measured against: the bare socket, redis-benchmark, pickles in a stream, Reverb."""

import csv
import pickle  # the wire format of another system; Slipstream itself never uses it
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pydantic
import redis

from slipstream.common.records.trajectory import Trajectory
from slipstream.replay.buffer.bulk import WINDOW
from slipstream.replay.server.redis_server import Server

BUILD = Path(__file__).resolve().parents[3] / "build"
REVERB_PYTHON = BUILD / "reverb" / "bin" / "python"
REDIS_TOOLS = BUILD / "redis-tools" / "usr"
SETUP = "run `make bench-replay`, which installs it, or tools/setup_bench_replay.sh"
TIMEOUT_S = 60.0
KEYS = [b"payload:%012d" % number for number in range(16)]


class RivalMissing(RuntimeError):
    """A system to measure against is not installed; the message says how to install it."""


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


class TrainingText(pydantic.BaseModel):
    """What PipelineRL sends per trajectory: the fields of its class of this name in pipelinerl/rollouts.py."""

    text: str
    n_predicted: int
    reward: float = 0.0
    logprobs: list[float] = []  # of the sampled tokens
    ref_logprobs: list[float] = []  # filled by its preprocessor
    input_ids: list[int] = []
    labels: list[int] = []  # the ids, and -100 where the policy did not sample
    group_id: str | None = None
    finished: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    visual_features: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        """The whole episode as one record. This is the best case: its agents make one record per call of the model."""
        sampled = trajectory.loss_mask_array()
        ids = trajectory.token_array()
        num_sampled = int(sampled.sum())
        return cls(
            text="four" * trajectory.num_tokens,  # about the length of a token of English
            n_predicted=4 * num_sampled,
            reward=trajectory.total_reward,
            logprobs=trajectory.behaviour_logprob_array()[sampled].tolist(),
            input_ids=ids.tolist(),
            labels=np.where(sampled, ids, -100).tolist(),
            group_id=f"scheduler_{trajectory.group_id}",
            finished=True,
            prompt_tokens=trajectory.num_tokens - num_sampled,
            output_tokens=num_sampled,
            metadata={"model_version": trajectory.oldest_policy_version, "rollout_index": 0, "step_index": 0},
        )


class PickledStream:
    """Groups as pickles in a Redis stream, as PipelineRL stores them (github.com/ServiceNow/PipelineRL).

    Its actor dumps each TrainingText of a group and writes the list as one entry (pipelinerl/actor.py,
    `data_stream_writer.write`); `RedisStreamWriter` and `RedisStreamReader` (pipelinerl/streams.py) pickle it, XADD it
    under an index with a limit, and XREAD one entry at a time from the last that was seen, without a group or an XACK.
    """

    STREAM, MAX_ENTRIES, BLOCK_MS = "pickled", 1_000_000, 100

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def insert(self, group: Sequence[TrainingText] | Sequence[Trajectory], num_groups: int) -> float:
        """Write the group `num_groups` times into a new stream; return the seconds."""
        self._client.delete(self.STREAM)
        started = time.perf_counter()
        for index in range(num_groups):
            dumped = [each.model_dump() if isinstance(each, TrainingText) else each for each in group]
            entry: dict[Any, Any] = {"index": index, "data": pickle.dumps(dumped)}
            self._client.xadd(self.STREAM, entry, maxlen=self.MAX_ENTRIES, approximate=True)
        return time.perf_counter() - started

    def sample(self, num_groups: int) -> float:
        """Read everything that was inserted; return the seconds."""
        started, last_id = time.perf_counter(), b"0"
        for index in range(num_groups):
            reply: Any = self._client.xread({self.STREAM: last_id}, count=1, block=self.BLOCK_MS)
            ((_, ((last_id, entry),)),) = reply
            if int(entry[b"index"]) != index:
                raise RuntimeError(f"entry {index} has index {entry[b'index']!r}")
            pickle.loads(entry[b"data"])
        return time.perf_counter() - started


class Reverb:
    """A Reverb server and its client, each in its own process, like Redis and our client."""

    def __init__(self, payload: Path) -> None:
        """`payload` is the file with the bytes of an item. Raises RivalMissing."""
        if not REVERB_PYTHON.exists():
            raise RivalMissing(f"Reverb is not installed at {REVERB_PYTHON}: {SETUP}")
        self._server = self._start("serve")
        self._client = self._start("drive", self._line(self._server), str(payload))
        self._line(self._client)

    def insert(self, num_items: int, *, window: int) -> float:
        return self._ask(f"insert {num_items} {window}")

    def sample(self, num_items: int) -> float:
        return self._ask(f"sample {num_items}")

    def sample_dataset(self, num_items: int, *, window: int) -> float:
        return self._ask(f"dataset {num_items} {window}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (self._client, self._server):
            with process:  # closes its standard input, which ends it, and waits
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
            raise RivalMissing(f"Reverb ended with code {process.wait(TIMEOUT_S)}; try {REVERB_PYTHON} by hand")
        return line


def redis_benchmark(server: Server, num_payloads: int) -> float:
    """GETs per second of KEYS, which must exist, by 50 clients in C without pipelining, its defaults."""
    found = shutil.which("redis-benchmark") or str(REDIS_TOOLS / "bin" / "redis-benchmark")
    if not Path(found).exists():
        raise RivalMissing(f"redis-benchmark is not installed: {SETUP}")
    libraries = next(iter(sorted((REDIS_TOOLS / "lib").glob("*-linux-gnu"))), "")
    ended = subprocess.run(
        # Other users can see the password in the arguments; the server exists only for this benchmark.
        [
            found,
            "-p",
            str(server.port),
            "-a",
            server.password,
            "-n",
            str(num_payloads),
            "-r",
            str(len(KEYS)),
            "--csv",
            "GET",
            "payload:__rand_int__",
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={"LD_LIBRARY_PATH": str(libraries)},
    )
    rows = list(csv.DictReader(ended.stdout.splitlines()))
    if not rows:
        raise RivalMissing(f"redis-benchmark printed no numbers: {ended.stdout} {ended.stderr}")
    return float(rows[0]["rps"])
