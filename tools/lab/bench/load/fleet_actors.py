"""Thousands of simulated actors in one process: each has its name, its connections, a lease and an actor's intervals.

They send the same requests and bytes as `slipstream.actors.host.act`: the offer, the run's state, heartbeats, leases
and inserts. A simulated actor has one connection to each server, and no engine and no environment.
"""

import contextlib
import heapq
import itertools
import json
import random
import selectors
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from slipstream.actors.host.act import IDLE_S
from slipstream.actors.host.beat import BEAT_S, BEATS
from slipstream.actors.host.poll_interval import PollInterval
from slipstream.actors.host.refresh import WAIT_S
from slipstream.common.process.wire import encode
from slipstream.common.records.trajectory import Task, encode_trajectory
from slipstream.replay.buffer.actor_buffer import ORPHAN_TTL_S
from slipstream.replay.buffer.bulk import packed
from slipstream.replay.buffer.payloads import record_of, result_of
from slipstream.replay.fleet.fleet import MEMBER_TTL_S, Member, MemberState
from slipstream.replay.records.keys import key, shard_name
from slipstream.tools.lab.bench.load.replay_load import RUN_ID, TRAJECTORY

Reply = int | bytes | list[Any] | None
RECEIVE_BYTES = 1 << 16


class Leased(msgspec.Struct, kw_only=True):
    """A group that an actor plays; every member below `next_member` is stored."""

    shard: int
    group_id: int
    fence: int
    num_members: int
    next_member: int = 0


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one process of simulated actors."""

    servers: list[tuple[int, str]]  # port and password of each shard's server; the first has the run's own keys
    shas: dict[str, str]  # of the scripts, by name
    first_actor: int
    leases: list[Leased]  # one for each actor
    period_s: float  # between two inserts of one actor
    lease_ttl_s: float
    measured_s: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of simulated actors measured."""

    insert_s: list[float]
    lease_s: list[float]  # of requests for a group that found one
    requests: dict[str, int]  # by kind
    late_s: float  # how late the process was in sending a request, 99th percentile: its own delay, not the server's


class Connection:
    """A connection on which requests are answered in order."""

    def __init__(self, address: tuple[int, str], selector: selectors.BaseSelector) -> None:
        port, password = address
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(packed(("AUTH", password)))
        if (answer := self._socket.recv(64)) != b"+OK\r\n":
            raise RuntimeError(f"the server answered {answer!r}")
        self._received = bytearray()
        self._waiting = deque[tuple[int, list[Reply], Callable[[list[Reply]], None]]]()
        selector.register(self._socket, selectors.EVENT_READ, self)

    def ask(self, *requests: tuple[Any, ...], then: Callable[[list[Reply]], None]) -> None:
        """Send the requests together; `then` gets their replies."""
        self._waiting.append((len(requests), [], then))
        self._socket.sendall(packed(*requests))

    def receive(self) -> None:
        """Read what has arrived, and pass on the replies that are complete."""
        self._received += self._socket.recv(RECEIVE_BYTES)
        start = 0
        with contextlib.suppress(IndexError):
            while True:
                reply, start = _parsed(self._received, start)
                num, replies, then = self._waiting[0]
                replies.append(reply)
                if len(replies) == num:
                    self._waiting.popleft()
                    then(replies)
        del self._received[:start]


def _parsed(data: bytearray, start: int) -> tuple[Reply, int]:
    """The reply at `start`, and where it ends. Raises IndexError if it is not complete."""
    end = data.find(b"\r\n", start)
    if end < 0:
        raise IndexError
    kind, line, end = data[start], bytes(data[start + 1 : end]), end + 2
    if kind == ord("+"):
        return line, end
    if kind == ord(":"):
        return int(line), end
    if kind == ord("$"):
        size = int(line)
        if size < 0:
            return None, end
        if len(data) < end + size + 2:
            raise IndexError
        return bytes(data[end : end + size]), end + size + 2
    if kind == ord("*"):
        items = list[Reply]()
        for _ in range(max(0, int(line))):
            item, end = _parsed(data, end)
            items.append(item)
        return items if int(line) >= 0 else None, end
    raise RuntimeError(f"the server answered {line!r}")


class Loop:
    """Runs what is due, and receives meanwhile."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.selector = selectors.DefaultSelector()
        self.measuring = False
        self.insert_s, self.lease_s, self.late_s = list[float](), list[float](), list[float]()
        self.requests = Counter[str]()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.perf_counter() + delay_s, next(self._order), do))

    def run(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while (now := time.perf_counter()) < until:
            while self._due and self._due[0][0] <= now:
                due, _, do = heapq.heappop(self._due)
                self.late_s.append(now - due)
                do()
            left_s = min(until, self._due[0][0]) - time.perf_counter() if self._due else 0.01
            for ready, _ in self.selector.select(max(0.0, left_s)):
                ready.data.receive()

    def counted(self, kind: str) -> None:
        if self.measuring:
            self.requests[kind] += 1


class Actor:
    """One simulated actor: each kind of request has its own rhythm, as the tasks of an actor have."""

    def __init__(self, number: int, lease: Leased, loop: Loop) -> None:
        self.num_beats = 0
        self._name = name_of(number)
        self._lease: Leased | None = lease
        self._loop, self._settings, self._interval = loop, loop.settings, PollInterval()
        self._connections = [Connection(server, loop.selector) for server in loop.settings.servers]
        self._waiting = Connection(loop.settings.servers[0], loop.selector)  # for an offer, in a thread of its own
        self._member = encode(_member(self._name))

    def begin(self, phase: float) -> None:
        """Start to send heartbeats, then all but the inserts; `phase`, in [0, 1), spreads the actors over time."""
        self._loop.after(phase * MEMBER_TTL_S / BEATS, self._beat)

    def begin_inserts(self, phase: float) -> None:
        """Start to store members, the first one after the share `phase` of the time between two."""
        self._loop.after(phase * self._settings.period_s, self._insert)

    def _run_key(self, *parts: str) -> str:
        return key(RUN_ID, *parts)

    def _base(self, shard: int, stream: str = "train") -> str:
        return key(shard_name(RUN_ID, shard), stream)

    def _call(self, shard: int, script: str, keys: list[str], *arguments: Any) -> tuple[Any, ...]:
        return ("EVALSHA", self._settings.shas[script], len(keys), *keys, *arguments)

    def _ask(self, kind: str, shard: int, *requests: tuple[Any, ...], then: Callable[[list[Reply]], None]) -> None:
        self._loop.counted(kind)
        self._connections[shard].ask(*requests, then=then)

    def _wait(self) -> None:
        block_ms, name = round(1000 * self._interval.seconds(WAIT_S)), self._run_key("weights", "latest", "versions")
        self._loop.counted("offer")
        self._waiting.ask(("XREAD", "BLOCK", block_ms, "STREAMS", name, "0-0"), then=lambda _: self._wait())

    def _beat(self) -> None:
        def beat(_: list[Reply]) -> None:
            keys = [self._run_key("fleet"), self._run_key("fleet", "deadlines")]
            call = self._call(0, "beat", keys, self._name, self._member, round(1000 * MEMBER_TTL_S))
            self._ask("beat", 0, call, then=again)

        def again(replies: list[Reply]) -> None:
            assert isinstance(replies[0], int)
            self._interval.num_members = replies[0]
            self.num_beats += 1
            if self.num_beats == 2:  # now it knows how many they are
                self._wait()
                self._renew()
            self._loop.after(self._interval.seconds(BEAT_S, most_s=MEMBER_TTL_S / BEATS), self._beat)

        self._ask("state", 0, ("SRANDMEMBER", self._run_key("state")), then=beat)

    def _renew(self) -> None:
        ttl_s = self._settings.lease_ttl_s
        self._loop.after(self._interval.seconds(BEAT_S, most_s=ttl_s / BEATS), self._renew)
        if (lease := self._lease) is None:
            return

        def renewed(replies: list[Reply]) -> None:
            if replies != [[b"%d" % lease.group_id]] and self._lease is lease:
                raise RuntimeError(f"{self._name} has lost group {lease.group_id}: {replies}")

        base = self._base(lease.shard)
        arguments = (self._name, round(1000 * ttl_s), lease.group_id, lease.fence)
        call = self._call(lease.shard, "heartbeat", [base, f"{base}:counters"], *arguments)
        self._ask("heartbeat", lease.shard, call, then=renewed)

    def _insert(self) -> None:
        """Store the next member of the leased group; after the last one lease another group."""
        self._loop.after(self._settings.period_s, self._insert)
        if (lease := self._lease) is None:
            return
        member, asked = lease.next_member, time.perf_counter()
        lease.next_member += 1
        if lease.next_member == lease.num_members:
            self._lease = None

        def stored(replies: list[Reply]) -> None:
            if replies != [b"OK", b"stored"]:
                raise RuntimeError(f"{self._name}, group {lease.group_id}: the server answered {replies}")
            if self._loop.measuring:
                self._loop.insert_s.append(time.perf_counter() - asked)
            if lease.next_member == lease.num_members and member == lease.num_members - 1:
                self._lease_next()

        self._ask("insert", lease.shard, *self._insertion(lease, member), then=stored)

    def _insertion(self, lease: Leased, member: int) -> list[tuple[Any, ...]]:
        task = Task(env="shop", split="train", index=lease.group_id)
        trajectory = msgspec.structs.replace(
            TRAJECTORY, task=task, group_id=lease.group_id, member=member, actor=self._name
        )
        frame, base = encode_trajectory(trajectory), self._base(lease.shard)
        blob = f"{base}:blob:{lease.group_id}:{member}:0:{lease.fence}"
        record = record_of(trajectory, fence=lease.fence, num_bytes=len(frame))
        result = result_of(trajectory)
        call = self._call(lease.shard, "insert", [base, blob], lease.group_id, member, record, *result)
        return [("SET", blob, frame, "EX", ORPHAN_TTL_S, "NX"), call]

    def _lease_next(self) -> None:
        """Ask for an evaluation, then the shards in random order, until one has a group."""
        shards = [
            (0, "eval"),
            *((shard, "train") for shard in random.sample(range(len(self._connections)), k=len(self._connections))),
        ]
        self._ask_for_group(iter(shards))

    def _ask_for_group(self, streams: Iterator[tuple[int, str]]) -> None:
        found = next(streams, None)
        if found is None:
            self._loop.after(self._interval.seconds(IDLE_S) * random.uniform(0.5, 1.5), self._lease_next)
            return
        shard, stream = found
        base, asked = self._base(shard, stream), time.perf_counter()

        def leased(replies: list[Reply]) -> None:
            (reply,) = replies
            if not isinstance(reply, list):
                self._ask_for_group(streams)
                return
            fence, _, group_id, num_members = reply[:4]
            self._lease = Leased(shard=shard, group_id=int(group_id), fence=int(fence), num_members=num_members)
            if self._loop.measuring:
                self._loop.lease_s.append(time.perf_counter() - asked)

        request = random.getrandbits(128).to_bytes(16, "big").hex()
        arguments = (self._name, request, round(1000 * self._settings.lease_ttl_s))
        call = self._call(shard, "lease", [base, f"{base}:counters"], *arguments)
        self._ask(f"lease {stream}", shard, call, then=leased)


def name_of(number: int) -> str:
    """The name of an actor, as a host with 8 of them gives it."""
    return f"host-{number // 8}-{4_000_000 + number}-0-{number % 8}"


def _member(name: str) -> Member:
    return Member(
        name=name,
        host=name.rpartition("-")[0],
        role="actor",
        zone="eu-central-1a",
        instance_kind="spot",
        price_per_hour=2.5,
        engine="vllm 0.32.0 cuda",
        transport="pull",
        policy_version=3,
        num_episodes=8,
        max_episodes=64,
        used_slots=8.0,
        generated_tokens=10_000_000,
        kept_tokens=9_000_000,
        tokens_per_s=2400.0,
        kv_use=0.5,
        state=MemberState.SERVING,
        started_at_s=1.7e9,
        served_s=3600.0,
        last_pause_s=0.05,
        num_refreshes=100,
        refusal=None,
    )


def main() -> None:
    """Read the settings, connect every actor, and play for `measured_s` when the parent says so."""
    settings = msgspec.json.decode(sys.stdin.readline(), type=WorkerSettings)
    loop = Loop(settings)
    actors = [Actor(settings.first_actor + number, lease, loop) for number, lease in enumerate(settings.leases)]
    print("connected", flush=True)
    sys.stdin.readline()
    for number, actor in enumerate(actors):
        actor.begin(number / len(actors))
    while min(actor.num_beats for actor in actors) < 2:
        loop.run(0.1)
    print("ready", flush=True)
    heard = selectors.DefaultSelector()
    heard.register(sys.stdin, selectors.EVENT_READ)
    while not heard.select(0):
        loop.run(0.1)
    sys.stdin.readline()
    for number, actor in enumerate(actors):
        actor.begin_inserts(number / len(actors))
    loop.measuring, loop.late_s = True, []
    loop.run(settings.measured_s)
    late_s = sorted(loop.late_s)[int(0.99 * len(loop.late_s))]
    measured = Measured(insert_s=loop.insert_s, lease_s=loop.lease_s, requests=dict(loop.requests), late_s=late_s)
    print(json.dumps(msgspec.to_builtins(measured)), flush=True)


if __name__ == "__main__":
    main()
