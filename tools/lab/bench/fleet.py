"""`make bench-fleet`: a learner and up to 9,000 simulated actors on one Redis server, and on four.

The learner is this process: it claims, opens, settles and reads books and fleet as a real one does at each step.
docs/benchmarks.md has the method.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import redis

from slipstream.common.process.connection import connect
from slipstream.learner.supply.supply import POLL_S
from slipstream.replay.buffer.verbs import ACTORS
from slipstream.replay.fleet.fleet import Fleet, RunState
from slipstream.replay.records import scripts
from slipstream.replay.records.keys import key
from slipstream.replay.server.redis_server import Server, find_executable, start_server
from slipstream.replay.server.redis_version import version_of
from slipstream.tools.lab.bench import benchmark
from slipstream.tools.lab.bench.benchmark import Row
from slipstream.tools.lab.bench.load.fleet_actors import Leased, Measured, WorkerSettings, name_of
from slipstream.tools.lab.bench.load.replay_load import GROUP_SIZE, RUN_ID, Groups, groups_of

# Actors and servers. Each actor has two connections to the first one; 20,000 open files are a usual limit.
FLEETS = ((100, 1), (1_000, 1), (9_000, 1), (9_000, 4))
NUM_PROCESSES = 3
INSERTS_PER_S = 400.0  # by all actors together: as many as one learner trains on
STEP_GROUPS = 48
QUEUED = 4 * STEP_GROUPS
LEASE_TTL_S = 60.0  # as `groups_of` configures
MEASURED_S = 10.0
REPEATS = 1
START_TIMEOUT_S = 120.0


@dataclass(kw_only=True, slots=True)
class Learned:
    """What the learner did and waited for."""

    num_steps: int = 0
    claim_s: list[float] = field(default_factory=list)  # of one shard's share of a step
    starved_s: float = 0.0  # no shard had enough groups
    open_s: float = 0.0
    settle_s: float = 0.0
    read_s: float = 0.0  # books and members
    wall_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One fleet on its servers."""

    insert_p50_ms: float
    insert_p99_ms: float
    lease_p99_ms: float
    claim_ms: float
    redis_wait: float  # share of the learner's time that it waited for Redis's answers
    read_ms: float  # books and members, at each step
    requests_per_s: float
    server_cores: float  # of the busiest server
    actor_kib: float  # in the first server's memory
    trajectory_kib: float
    late_ms: float  # of the simulated actors themselves, 99th percentile


def main() -> int:
    """Measure, print, and write docs/benchmarks/fleet.json; return 0."""
    measuring = benchmark.Run("fleet")
    results: dict[tuple[int, int], list[Result]] = {fleet: [] for fleet in FLEETS}
    for _ in range(REPEATS):
        for num_actors, num_servers in FLEETS:
            results[num_actors, num_servers].append(measure(num_actors, num_servers))
            print(num_actors, num_servers, results[num_actors, num_servers][-1], flush=True)
    major, minor, _ = version_of(find_executable())
    return measuring.end(rows_of(results), versions={"redis": f"{major}.{minor}", "redis-py": redis.__version__})


TITLES = {
    "insert_p50_ms": ("insert p50", "ms"),
    "insert_p99_ms": ("insert p99", "ms"),
    "lease_p99_ms": ("lease p99", "ms"),
    "claim_ms": ("claim of a shard's share of 48 groups, median", "ms"),
    "redis_wait": ("the learner's time in Redis's verbs", "of 1"),
    "read_ms": ("books and members, read at each step", "ms"),
    "requests_per_s": ("requests", "/s"),
    "server_cores": ("CPU of the busiest server", "cores"),
    "actor_kib": ("memory for an actor", "KiB"),
    "trajectory_kib": ("memory for a trajectory", "KiB"),
    "late_ms": ("delay of the simulation itself, p99", "ms"),
}


def rows_of(results: dict[tuple[int, int], list[Result]]) -> list[Row]:
    """Each measurement of each fleet, against that of the smallest."""
    smallest = results[FLEETS[0]]
    return [
        Row.of(
            f"{num_actors:,} actors, {num_servers} server{'s' if num_servers > 1 else ''}: {title}",
            [getattr(one, name) for one in results[num_actors, num_servers]],
            unit=unit,
            against=[getattr(one, name) for one in smallest],
        )
        for num_actors, num_servers in results
        for name, (title, unit) in TITLES.items()
    ]


def measure(num_actors: int, num_servers: int) -> Result:
    """Run one fleet for MEASURED_S on servers of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as root, ExitStack() as stack:
        servers = [stack.enter_context(start_server(Path(root) / f"redis-{n}")) for n in range(num_servers)]
        clients = [stack.enter_context(connect(server.admin_url)) for server in servers]
        for client in clients:
            client.config_set("appendfsync", "everysec")  # otherwise the disk would be measured
        shards = [groups_of(client, "train", shard=shard) for shard, client in enumerate(clients)]
        _describe(clients[0])
        leases = _leases(shards, num_actors)
        workers = _Workers(stack, servers, _shas(clients), leases, num_actors)
        actor_bytes = _bytes_of_actors(clients[0]) / num_actors
        processes = [psutil.Process(server.process.pid) for server in servers]
        cpu_s, started = [sum(process.cpu_times()[:2]) for process in processes], time.perf_counter()
        measured, learned = workers.play(lambda: _learn(shards, clients[0]))
        wall_s = time.perf_counter() - started
        cores = [
            (sum(process.cpu_times()[:2]) - before) / wall_s for process, before in zip(processes, cpu_s, strict=True)
        ]
        trajectory_bytes = _bytes_of_trajectory(clients[0])
    return _result(measured, learned, cores=cores, actor_bytes=actor_bytes, trajectory_bytes=trajectory_bytes)


def _result(
    measured: list[Measured], learned: Learned, *, cores: list[float], actor_bytes: float, trajectory_bytes: float
) -> Result:
    inserts = statistics.quantiles([s for one in measured for s in one.insert_s], n=100)
    leases = statistics.quantiles([s for one in measured for s in one.lease_s], n=100)
    in_redis_s = sum(learned.claim_s) + learned.open_s + learned.settle_s + learned.read_s
    return Result(
        insert_p50_ms=1e3 * inserts[49],
        insert_p99_ms=1e3 * inserts[98],
        lease_p99_ms=1e3 * leases[98],
        claim_ms=1e3 * statistics.median(learned.claim_s),
        redis_wait=in_redis_s / learned.wall_s,
        read_ms=1e3 * learned.read_s / learned.num_steps,
        requests_per_s=sum(sum(one.requests.values()) for one in measured) / MEASURED_S,
        server_cores=max(cores),
        actor_kib=actor_bytes / 1024,
        trajectory_kib=trajectory_bytes / 1024,
        late_ms=1e3 * max(one.late_s for one in measured),
    )


def _describe(client: redis.Redis) -> None:
    """Write what the actors read of the run: its state."""
    Fleet(client, RUN_ID).set_run_state(RunState.TRAINING)


def _leases(shards: list[Groups], num_actors: int) -> list[Leased]:
    """A leased group for each actor, of 1 to GROUP_SIZE members, as in a fleet that has run for a while."""
    leases = []
    for number, groups in enumerate(shards):
        share = range(number, num_actors, len(shards))
        for size in range(1, GROUP_SIZE + 1):
            groups.open(len(share[size - 1 :: GROUP_SIZE]), group_size=size)
        for actor in share:
            lease = groups.actor.lease(name_of(actor))
            assert lease is not None
            leased = Leased(
                shard=number, group_id=lease.ticket.group_id, fence=lease.fence, num_members=len(lease.missing)
            )
            leases.append((actor, leased))
        groups.open(QUEUED // len(shards))
    by_actor = dict(leases)
    return [by_actor[actor] for actor in range(num_actors)]


def _shas(clients: list[redis.Redis]) -> dict[str, str]:
    """Load the scripts that the simulated actors call, and return their hashes."""
    verbs = {verb: ("prelude", "begin", verb) for verb in ACTORS} | {"beat": ("beat",)}
    for client in clients:
        loaded = {verb: client.script_load(scripts.load(client, *files).text) for verb, files in verbs.items()}
    return loaded


def _bytes_of_actors(client: redis.Redis) -> float:
    """The memory of their connections and of their heartbeats."""
    keys = [key(RUN_ID, "fleet"), key(RUN_ID, "fleet", "deadlines")]
    connections: int = client.info("memory")["mem_clients_normal"]
    return connections + sum(_bytes(client, name) for name in keys)


def _bytes_of_trajectory(client: redis.Redis) -> float:
    """The memory of a payload and of its share of a group that is full."""
    base = key(RUN_ID, "train")
    payload = next(client.scan_iter(f"{base}:blob:*", count=10_000))
    full = max(_bytes(client, name) for name in client.scan_iter(f"{base}:group:*", count=10_000))
    return _bytes(client, payload) + full / GROUP_SIZE


def _bytes(client: redis.Redis, name: str) -> int:
    return int(client.memory_usage(name, samples=0) or 0)


def _held(shards: list[Groups]) -> int:
    return sum(groups.learner.ledger().held_trajectories for groups in shards)


class _Workers:
    """The processes of simulated actors. They are ready when each actor has sent two heartbeats."""

    def __init__(
        self, stack: ExitStack, servers: list[Server], shas: dict[str, str], leases: list[Leased], num_actors: int
    ) -> None:
        bounds = [num_actors * number // NUM_PROCESSES for number in range(NUM_PROCESSES + 1)]
        self._processes = [stack.enter_context(_started()) for _ in range(NUM_PROCESSES)]
        for process, first, end in zip(self._processes, bounds, bounds[1:], strict=False):
            settings = WorkerSettings(
                servers=[(server.port, server.password) for server in servers],
                shas=shas,
                first_actor=first,
                leases=leases[first:end],
                period_s=num_actors / INSERTS_PER_S,
                lease_ttl_s=LEASE_TTL_S,
                measured_s=MEASURED_S,
            )
            # Not as an argument, which other users could read: it has the passwords.
            _send_line(process, msgspec.json.encode(settings).decode())
        for answer in ("connected", "ready"):
            for process in self._processes:
                if (line := _read_line(process).strip()) != answer:
                    raise RuntimeError(f"a process of simulated actors printed {line!r} instead of {answer!r}")
            if answer == "connected":
                for process in self._processes:
                    _send_line(process, "begin")

    def play(self, learn: Callable[[], Learned]) -> tuple[list[Measured], Learned]:
        """Let them play for MEASURED_S, with `learn` beside them."""
        for process in self._processes:
            _send_line(process, "go")
        learned = learn()
        return [msgspec.json.decode(_read_line(process), type=Measured) for process in self._processes], learned


def _started() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "slipstream.tools.lab.bench.load.fleet_actors"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


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


def _learn(shards: list[Groups], client: redis.Redis) -> Learned:
    """Claim, open, settle and read, step after step, for MEASURED_S."""
    learned, fleet, started = Learned(), Fleet(client, RUN_ID), time.perf_counter()
    share = STEP_GROUPS // len(shards)
    while time.perf_counter() - started < MEASURED_S:
        step = learned.num_steps + 1
        for groups in shards:
            claimed: list[object] = []
            while not claimed and time.perf_counter() - started < MEASURED_S:
                asked = time.perf_counter()
                claimed = list(groups.learner.claim(step, share, policy_version=3, max_lag=0))
                if claimed:
                    learned.claim_s.append(time.perf_counter() - asked)
                else:
                    time.sleep(POLL_S)
                    learned.starved_s += time.perf_counter() - asked
        if not claimed:
            break
        learned.open_s += _seconds(lambda: [groups.open(share) for groups in shards])
        learned.settle_s += _seconds(lambda: [groups.learner.settle(step) for groups in shards])  # noqa: B023
        learned.read_s += _seconds(lambda: [_held(shards), fleet.members(), fleet.everyone()])
        learned.num_steps = step
    learned.wall_s = time.perf_counter() - started
    return learned


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
