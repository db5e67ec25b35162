"""Many actors on one server: each is a coroutine with its own connection, lease and heartbeat, in two processes.

They send the same scripts and bytes as `ActorBuffer`. Thousands of real clients would need more cores than the server.
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
from replay.actor_buffer import ORPHAN_TTL_S
from replay.bulk import packed
from replay.keys import key
from replay.payloads import result_of
from replay.server import Server
from tools.bench.benchmark import Row
from tools.bench.replay_load import FRAME, RUN_ID, TRAJECTORY, groups_of

NUM_ACTORS = (100, 1000, 4000)
NUM_PROCESSES = 2
INSERTS_PER_S = 400.0  # by all actors together, so that only their number differs
BEAT_S = 1.0  # as actors do
MEASURED_S = 10.0
REPEATS = 3
GROUP_SIZE = 64  # more than one actor inserts, so that it leases only once, before the measurement
START_TIMEOUT_S = 60.0


@dataclass(kw_only=True, slots=True)
class Measured:
    """The measurements of one number of actors over MEASURED_S."""

    p50_ms: float
    p99_ms: float
    inserts_per_s: float
    server_cpu: float  # cores


def fleet_rows(server: Server) -> list[Row]:
    """Latency of an insert and CPU of the server, by the number of actors, against the smallest fleet."""
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
    """Give each actor a lease, let them insert, and combine their measurements."""
    with connect(server.secret_url) as client:
        groups = groups_of(client, stream)
        groups.open(num_actors, group_size=GROUP_SIZE)
        leases = [groups.actor.lease(f"actor-{number}") for number in range(num_actors)]
        settings = WorkerSettings(
            port=server.port,
            password=server.password,
            stream=stream,
            insert_sha=client.script_load(scripts.load(client, "prelude", "begin", "insert").text),
            heartbeat_sha=client.script_load(scripts.load(client, "prelude", "begin", "heartbeat").text),
            period_s=num_actors / INSERTS_PER_S,
            measured_s=MEASURED_S,
            leases=[(lease.ticket.group_id, lease.fence) for lease in leases if lease is not None],
        )
        latencies_s, server_cpu = _worked(settings, psutil.Process(server.process.pid))
        client.flushall()
    percentiles = statistics.quantiles(latencies_s, n=100)
    return Measured(
        p50_ms=1e3 * percentiles[49],
        p99_ms=1e3 * percentiles[98],
        inserts_per_s=len(latencies_s) / MEASURED_S,
        server_cpu=server_cpu,
    )


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one process of simulated actors."""

    port: int
    password: str
    stream: str
    insert_sha: str
    heartbeat_sha: str
    period_s: float  # between two inserts of one actor
    measured_s: float
    leases: list[tuple[int, int]]  # group id and fence, one per actor


def _worked(settings: WorkerSettings, server: psutil.Process) -> tuple[list[float], float]:
    """Run NUM_PROCESSES processes; return the seconds of every insert, and the cores that the server used."""
    with ExitStack() as stack:
        shares = [settings.leases[number::NUM_PROCESSES] for number in range(NUM_PROCESSES)]
        processes = [stack.enter_context(_started(msgspec.structs.replace(settings, leases=share))) for share in shares]
        for process in processes:
            _read_line(process)
        for process in processes:
            _send_line(process, "go")
        cpu_s, started = sum(server.cpu_times()[:2]), time.perf_counter()
        time.sleep(MEASURED_S)
        cpu_s, wall_s = sum(server.cpu_times()[:2]) - cpu_s, time.perf_counter() - started
        latencies_s = [latency_s for process in processes for latency_s in json.loads(_read_line(process))]
    return latencies_s, cpu_s / wall_s


def _started(settings: WorkerSettings) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.bench.replay_fleet"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    _send_line(
        process, msgspec.json.encode(settings).decode()
    )  # not as an argument, which other users could read: it has the password
    return process


def _send_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of simulated actors ended with code {process.wait(START_TIMEOUT_S)}")
    return line


# --- The code of each process.


async def play(
    settings: WorkerSettings, lease: tuple[int, int], *, phase: float, ready: asyncio.Barrier
) -> list[float]:
    """Play one actor: insert every `period_s`, send a heartbeat every BEAT_S; return the seconds of each insert.

    `phase`, in [0, 1), spreads the actors over time.
    """
    group_id, fence = lease
    base = key(RUN_ID, settings.stream)
    actor = f"actor-{group_id - 1}"
    reader, writer = await asyncio.open_connection("127.0.0.1", settings.port)
    await _ask(reader, writer, packed(("AUTH", settings.password)), num_lines=1)
    await ready.wait()
    await ready.wait()
    started = time.perf_counter()
    next_insert, next_beat = started + phase * settings.period_s, started + phase * BEAT_S
    latencies_s: list[float] = []
    while (due := min(next_insert, next_beat)) < started + settings.measured_s:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if due == next_beat:
            beat = ("EVALSHA", settings.heartbeat_sha, 1, base, actor, 60_000, group_id, fence)
            _expect(await _ask(reader, writer, packed(beat), num_lines=3), b"%d" % group_id)
            next_beat += BEAT_S
            continue
        member = len(latencies_s)
        blob = f"{base}:blob:{group_id}:{member}:0:{fence}"
        record = f"0:{fence}:3:{len(FRAME)}:1:1:1:{actor}"
        request = packed(
            ("SET", blob, FRAME, "EX", ORPHAN_TTL_S, "NX"),
            (
                "EVALSHA",
                settings.insert_sha,
                2,
                base,
                blob,
                group_id,
                member,
                record,
                *result_of(TRAJECTORY, is_repeat=False),
            ),
        )
        asked = time.perf_counter()
        _expect(await _ask(reader, writer, request, num_lines=3), b"stored")
        latencies_s.append(time.perf_counter() - asked)
        next_insert += settings.period_s
    writer.close()
    return latencies_s


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, *, num_lines: int) -> bytes:
    """Send `request`; return the last of the `num_lines` of its answer. An error has one line."""
    writer.write(request)
    for _ in range(num_lines):
        line = await reader.readline()
        if line.startswith(b"-") or not line:
            raise RuntimeError(f"the server answered {line!r}")
    return line.rstrip()


def _expect(line: bytes, expected: bytes) -> None:
    if line != expected:
        raise RuntimeError(f"the server answered {line!r}, expected {expected!r}")


async def main() -> None:
    settings = msgspec.json.decode(sys.stdin.readline(), type=WorkerSettings)
    num_actors = len(settings.leases)
    ready = asyncio.Barrier(num_actors + 1)
    async with asyncio.TaskGroup() as actors:
        tasks = [
            actors.create_task(play(settings, lease, phase=number / num_actors, ready=ready))
            for number, lease in enumerate(settings.leases)
        ]
        await ready.wait()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await ready.wait()
    print(json.dumps([latency_s for task in tasks for latency_s in task.result()]), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
