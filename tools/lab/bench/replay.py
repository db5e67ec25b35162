"""`make bench-replay`: measure insert and claim against the bare socket.

All sides are measured alternately: one repeat has each side once. docs/benchmarks.md has the method.
"""

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import redis

from slipstream.common.process.connection import connect
from slipstream.common.process.wire import encode
from slipstream.replay.buffer.bulk import WINDOW
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.server.redis_server import find_executable as find_redis
from slipstream.replay.server.redis_version import version_of
from slipstream.tools.lab.bench import benchmark
from slipstream.tools.lab.bench.benchmark import Row
from slipstream.tools.lab.bench.load.raw_socket import KEYS, RawSocket
from slipstream.tools.lab.bench.load.replay_load import FRAME, GROUP_SIZE, NUM_TOKENS, TRAJECTORY, groups_of
from slipstream.tools.lab.loopback_server import Server, start_server

REPEATS = 11
NUM_ITEMS = 512  # trajectories that each side moves in a repeat
CLAIM_GROUPS = 2  # of 8: a claim of 16

Rates = defaultdict[str, list[float]]  # by what was measured: one a repeat, items per second


def main() -> int:
    """Measure, print, and write docs/benchmarks/replay.json; return 0 if every goal holds, else 1."""
    measuring = benchmark.Run("replay")
    with (
        tempfile.TemporaryDirectory(prefix="bench-replay-") as root,
        start_server(Path(root) / "redis") as server,
        connect(server.admin_url) as client,
    ):
        client.config_set("appendfsync", "everysec")  # otherwise every row would measure the disk
        rows = [*hot_calls(server, client), *bytes_per_token()]
    return measuring.end(rows, versions=_versions())


def hot_calls(server: Server, client: redis.Redis) -> list[Row]:
    """Insert and claim, against the socket."""
    rates = Rates(list)
    for _ in range(REPEATS + 1):
        ours(server, client, rates)
        client.flushall()
    return _hot_rows({name: values[-REPEATS:] for name, values in rates.items()})  # the first warms up


def ours(server: Server, client: redis.Redis, rates: Rates) -> None:
    """One repeat of our side, each part directly after that of the bare socket."""
    raw = RawSocket(server, FRAME)
    for name, compress in (("insert", False), ("insert compressed", True)):
        groups = groups_of(client, name.replace(" ", "-"), compress=compress)
        work = groups.lease(NUM_ITEMS // GROUP_SIZE)
        rates[f"{name}: raw SET"].append(NUM_ITEMS / raw.set(NUM_ITEMS))
        rates[name].append(NUM_ITEMS / _seconds(lambda: groups.actor.insert_all(work)))  # noqa: B023 - called at once
        claimed = _seconds(lambda: claim_all(groups.learner, NUM_ITEMS))  # noqa: B023
        rates[f"{name}: claim"].append(NUM_ITEMS / claimed)
        groups.learner.settle(NUM_ITEMS)
    client.mset(dict.fromkeys(KEYS, FRAME))
    rates["raw GET"].append(NUM_ITEMS / raw.get(NUM_ITEMS))
    raw.close()


def claim_all(buffer: LearnerBuffer, num_items: int) -> None:
    num_claimed = 0
    for step in range(1, num_items // GROUP_SIZE // CLAIM_GROUPS + 1):
        num_claimed += len(buffer.claim(step, CLAIM_GROUPS, policy_version=3, max_lag=0)) * GROUP_SIZE
    if num_claimed != num_items:
        raise RuntimeError(f"claimed {num_claimed} trajectories of the {num_items} that were inserted")


def _hot_rows(rates: dict[str, list[float]]) -> list[Row]:
    def row(name: str, ours: str, against: str, goal: str = "") -> Row:
        return Row.of(name, rates[ours], unit="/s", against=rates[against], goal=goal)

    return [
        row(f"insert, {WINDOW} under way, against a bare SET", "insert", "insert: raw SET", "ratio >= 0.7"),
        row("insert with zstd, against a bare SET", "insert compressed", "insert compressed: raw SET"),
        row("claim of 16, against a bare GET", "insert: claim", "raw GET"),
        row("claim of 16 with zstd, against a bare GET", "insert compressed: claim", "raw GET"),
    ]


def bytes_per_token() -> list[Row]:
    """Bytes per token of the trajectory that all other rows use."""
    compressed = len(encode(TRAJECTORY, compress=True)) / NUM_TOKENS
    plain = len(FRAME) / NUM_TOKENS
    return [
        Row.of("bytes a token, beside 9", [plain], unit="bytes", against=[9.0], goal="value <= 9"),
        Row.of("bytes a token with zstd, beside plain", [compressed], unit="bytes", against=[plain], goal="value <= 6"),
    ]


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _versions() -> dict[str, str]:
    version = version_of(find_redis())
    return {version.product.lower(): f"{version.major}.{version.minor}", "redis-py": redis.__version__}


if __name__ == "__main__":
    sys.exit(main())
