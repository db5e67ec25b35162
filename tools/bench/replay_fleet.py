"""Many actors on one server: each a coroutine with a connection, a lease and a heartbeat of its own, in two processes.

They send what `Buffer` sends, the same scripts and bytes; thousands of real clients would want more cores than it.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import psutil

from common.connection import connect
from replay import scripts
from replay.buffer import ORPHAN_TTL_S
from replay.bulk import packed
from replay.keys import key
from replay.server import Server
from tools.bench.benchmark import Row
from tools.bench.replay_load import FRAME, RUN_ID, Groups, a_buffer

NUM_ACTORS = (100, 1000, 4000)
NUM_PROCESSES = 2
INSERTS_PER_S = 400.0  # by all of them together, so that only their number differs
BEAT_S = 1.0  # as actors do
MEASURED_S = 10.0
REPEATS = 3
GROUP_SIZE = 64  # more than an actor inserts, so that it leases once, before the clock starts
START_TIMEOUT_S = 60.0


@dataclass(kw_only=True, slots=True)
class Measured:
    """One number of actors, for MEASURED_S."""

    p50_ms: float
    p99_ms: float
    inserts_per_s: float
    server_cpu: float  # cores


def fleet_rows(server: Server) -> list[Row]:
    """Latency of an insert and the server's CPU, by the number of actors, beside the smallest fleet."""
    measured: dict[int, list[Measured]] = {num_actors: [] for num_actors in NUM_ACTORS}
    for repeat in range(REPEATS):
        for num_actors in NUM_ACTORS:
            measured[num_actors].append(measure(server, num_actors, stream=f"fleet-{num_actors}-{repeat}"))
    smallest = measured[NUM_ACTORS[0]]
    rows = []
    for num_actors, repeats in measured.items():
        for name, unit in (("p50_ms", "ms"), ("p99_ms", "ms"), ("server_cpu", "cores"), ("inserts_per_s", "/s")):
            rows.append(
                Row.of(
                    f"{num_actors:,} actors, {TITLES[name]}, beside {NUM_ACTORS[0]}",
                    [getattr(one, name) for one in repeats],
                    unit=unit,
                    against=[getattr(one, name) for one in smallest],
                )
            )
    return rows


TITLES = {
    "p50_ms": "insert p50",
    "p99_ms": "insert p99",
    "server_cpu": "CPU of the server",
    "inserts_per_s": f"inserts of {INSERTS_PER_S:.0f}/s asked for",
}


def measure(server: Server, num_actors: int, *, stream: str) -> Measured:
    """Give each actor a lease, let them work, and add up what they saw."""
    with connect(server.secret_url) as client:
        buffer = a_buffer(client, stream)
        buffer.acquire_epoch()
        Groups(buffer=buffer).open(num_actors, group_size=GROUP_SIZE)
        leases = [buffer.lease(f"actor-{number}") for number in range(num_actors)]
        orders = Orders(
            port=server.port,
            password=server.password,
            stream=stream,
            insert_sha=client.script_load(scripts.load(client, "prelude", "begin", "insert").text),
            heartbeat_sha=client.script_load(scripts.load(client, "prelude", "begin", "heartbeat").text),
            period_s=num_actors / INSERTS_PER_S,
            measured_s=MEASURED_S,
            leases=[(lease.ticket.group_id, lease.fence) for lease in leases if lease is not None],
        )
        latencies_s, server_cpu = _worked(orders, psutil.Process(server.process.pid))
        client.flushall()
    percentiles = statistics.quantiles(latencies_s, n=100)
    return Measured(
        p50_ms=1e3 * percentiles[49],
        p99_ms=1e3 * percentiles[98],
        inserts_per_s=len(latencies_s) / MEASURED_S,
        server_cpu=server_cpu,
    )


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is told."""

    port: int
    password: str
    stream: str
    insert_sha: str
    heartbeat_sha: str
    period_s: float  # from insert to insert of one actor
    measured_s: float
    leases: list[tuple[int, int]]  # group id and fence, one an actor


def _worked(orders: Orders, server: psutil.Process) -> tuple[list[float], float]:
    """The seconds of every insert, and the cores that the server used, while NUM_PROCESSES did as told."""
    with ExitStack() as stack:
        shares = [orders.leases[number::NUM_PROCESSES] for number in range(NUM_PROCESSES)]
        processes = [stack.enter_context(_started(msgspec.structs.replace(orders, leases=share))) for share in shares]
        for process in processes:
            _heard(process)
        for process in processes:
            _tell(process, "go")
        cpu_s, started = sum(server.cpu_times()[:2]), time.perf_counter()
        time.sleep(MEASURED_S)
        cpu_s, wall_s = sum(server.cpu_times()[:2]) - cpu_s, time.perf_counter() - started
        latencies_s = [latency_s for process in processes for latency_s in json.loads(_heard(process))]
    return latencies_s, cpu_s / wall_s


def _started(orders: Orders) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.bench.replay_fleet"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    _tell(process, msgspec.json.encode(orders).decode())  # not in the arguments: it holds the password
    return process


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"simulated actors ended at once (exit {process.wait(START_TIMEOUT_S)})")
    return line


# --- What each of the processes runs.


async def play(orders: Orders, lease: tuple[int, int], *, phase: float, ready: asyncio.Barrier) -> list[float]:
    """One actor: insert every `period_s` and beat every BEAT_S for `measured_s`; return the seconds of each insert.

    `phase`, in [0, 1), spreads the actors.
    """
    group_id, fence = lease
    base = key(RUN_ID, orders.stream)
    actor = f"actor-{group_id - 1}"
    reader, writer = await asyncio.open_connection("127.0.0.1", orders.port)
    await _ask(reader, writer, packed(("AUTH", orders.password)), num_lines=1)
    await ready.wait()
    await ready.wait()
    started = time.perf_counter()
    next_insert, next_beat = started + phase * orders.period_s, started + phase * BEAT_S
    latencies_s: list[float] = []
    while (due := min(next_insert, next_beat)) < started + orders.measured_s:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if due == next_beat:
            beat = ("EVALSHA", orders.heartbeat_sha, 1, base, actor, 60_000, group_id, fence)
            _expect(await _ask(reader, writer, packed(beat), num_lines=3), b"%d" % group_id)
            next_beat += BEAT_S
            continue
        member = len(latencies_s)
        blob = f"{base}:blob:{group_id}:{member}:0:{fence}"
        record = f"0:{fence}:3:{len(FRAME)}:1:1:1:{actor}"
        request = packed(
            ("SET", blob, FRAME, "EX", ORPHAN_TTL_S, "NX"),
            ("EVALSHA", orders.insert_sha, 2, base, blob, group_id, member, record),
        )
        asked = time.perf_counter()
        _expect(await _ask(reader, writer, request, num_lines=3), b"stored")
        latencies_s.append(time.perf_counter() - asked)
        next_insert += orders.period_s
    writer.close()
    return latencies_s


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, *, num_lines: int) -> bytes:
    """The last of the lines that answer `request`; an error has one."""
    writer.write(request)
    for _ in range(num_lines):
        line = await reader.readline()
        if line.startswith(b"-") or not line:
            raise RuntimeError(f"the server answered {line!r}")
    return line.rstrip()


def _expect(line: bytes, expected: bytes) -> None:
    if line != expected:
        raise RuntimeError(f"the server answered {line!r}, not {expected!r}")


async def main() -> None:
    orders = msgspec.json.decode(sys.stdin.readline(), type=Orders)
    num_actors = len(orders.leases)
    ready = asyncio.Barrier(num_actors + 1)
    async with asyncio.TaskGroup() as actors:
        tasks = [
            actors.create_task(play(orders, lease, phase=number / num_actors, ready=ready))
            for number, lease in enumerate(orders.leases)
        ]
        await ready.wait()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await ready.wait()
    print(json.dumps([latency_s for task in tasks for latency_s in task.result()]), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
