"""Many actors on one server: each a thread with a client, a lease and a heartbeat of its own, in a few processes."""

import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import psutil

from common.connection import connect
from replay.server import Server
from tools.benchmark import Row
from tools.replay_load import Groups, a_buffer, attempts_at

NUM_ACTORS = (100, 1000, 4000)
NUM_PROCESSES = 2
INSERTS_PER_S = 400.0  # by all of them together, so that only their number differs
BEAT_S = 1.0  # as actors do
MEASURED_S = 10.0
REPEATS = 3
GROUP_SIZE = 64  # more than an actor inserts, so that it leases once, before the clock starts
STACK_BYTES = 512 << 10  # of a thread
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
    """Start the actors, let them work, and add up what they saw."""
    with connect(server.secret_url) as client:
        buffer = a_buffer(client, stream)
        buffer.acquire_epoch()
        Groups(buffer=buffer).open(num_actors, group_size=GROUP_SIZE)
        share = num_actors // NUM_PROCESSES
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tools.bench_replay_fleet", stream, str(share), str(share * number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(NUM_PROCESSES)
        ]
        for process in processes:
            _tell(process, server.secret_url)  # not in the arguments: it holds the password
        for process in processes:
            _heard(process)
        redis_process = psutil.Process(server.process.pid)
        for process in processes:
            _tell(process, "go")
        cpu_s, started = sum(redis_process.cpu_times()[:2]), time.perf_counter()
        time.sleep(MEASURED_S)
        cpu_s, wall_s = sum(redis_process.cpu_times()[:2]) - cpu_s, time.perf_counter() - started
        latencies_s = [latency for process in processes for latency in json.loads(_heard(process))]
        for process in processes:
            process.wait(START_TIMEOUT_S)
        client.flushall()
    percentiles = statistics.quantiles(latencies_s, n=100)
    return Measured(
        p50_ms=1e3 * percentiles[49],
        p99_ms=1e3 * percentiles[98],
        inserts_per_s=len(latencies_s) / MEASURED_S,
        server_cpu=cpu_s / wall_s,
    )


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


@dataclass(kw_only=True, slots=True)
class Fleet:
    """The actors of one process."""

    url: str
    stream: str
    period_s: float  # from insert to insert of one actor
    ready: threading.Barrier
    deadline: float = 0.0
    latencies_s: list[float] = field(default_factory=list)


def play(fleet: Fleet, name: str, phase: float) -> None:
    """One actor: insert every `period_s`, beat every BEAT_S, until the deadline; `phase` in [0, 1) spreads them."""
    with connect(fleet.url) as client:
        buffer = a_buffer(client, fleet.stream)
        lease = buffer.lease(name)
        assert lease is not None
        remaining = iter(attempts_at(lease))
        fleet.ready.wait(START_TIMEOUT_S)
        fleet.ready.wait(START_TIMEOUT_S)
        now = time.perf_counter()
        next_insert, next_beat = now + phase * fleet.period_s, now + phase * BEAT_S
        while (due := min(next_insert, next_beat)) < fleet.deadline:
            time.sleep(max(0.0, due - time.perf_counter()))
            if due == next_beat:
                buffer.heartbeat(name, [lease])
                next_beat += BEAT_S
                continue
            attempt = next(remaining)
            started = time.perf_counter()
            buffer.insert(*attempt)
            fleet.latencies_s.append(time.perf_counter() - started)
            next_insert += fleet.period_s


def main(stream: str, num_actors: int, first: int) -> None:
    threading.stack_size(STACK_BYTES)
    fleet = Fleet(
        url=sys.stdin.readline().strip(),
        stream=stream,
        period_s=NUM_PROCESSES * num_actors / INSERTS_PER_S,
        ready=threading.Barrier(num_actors + 1),
    )
    threads = [
        threading.Thread(target=play, args=(fleet, f"actor-{first + number}", number / num_actors))
        for number in range(num_actors)
    ]
    for thread in threads:
        thread.start()
    fleet.ready.wait(START_TIMEOUT_S)
    print("ready", flush=True)
    sys.stdin.readline()
    fleet.deadline = time.perf_counter() + MEASURED_S
    fleet.ready.wait(START_TIMEOUT_S)
    for thread in threads:
        thread.join()
    print(json.dumps(fleet.latencies_s), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
