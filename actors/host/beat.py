"""Sends an actor's heartbeats: renews its leases, and reports its state to the fleet."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slipstream.actors.group.group import EpisodeSetup
from slipstream.actors.host.poll_interval import PollInterval
from slipstream.actors.host.refresh import RefreshCounts
from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.process.shutdown import Shutdown
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.fleet.fleet import MEMBER_TTL_S, Fleet, Member, MemberState, RunState, UnknownRun
from slipstream.replay.records.ticket import Lease

BEAT_S = 1.0
PLAYED = (RunState.STARTING, RunState.TRAINING)
BEATS = 5  # the fewest in the time after which a lease or a member expires, however large the fleet is


@dataclass(kw_only=True, slots=True)
class Leases:
    """The groups that this actor has leased, each with the task that plays it, by (stream, group id)."""

    playing: dict[tuple[str, int], tuple[Lease, asyncio.Task[None]]] = field(default_factory=dict)

    def tasks(self) -> list[asyncio.Task[None]]:
        return [task for _, task in self.playing.values()]


class Pulse:
    """Collects the contents of an actor's heartbeats."""

    def __init__(self, setup: EpisodeSetup, *, counts: RefreshCounts, actors: ActorsConfig, shutdown: Shutdown) -> None:
        self._setup = setup
        self._counts = counts
        self._actors = actors
        self._shutdown = shutdown
        self._started_at_s = time.time()
        self._first = self._last = time.monotonic()
        self._last_tokens, self._last_slot_s = 0, setup.episodes.slot_s()

    def member(self) -> Member:
        """The heartbeat for now. Raises EngineDied."""
        setup, counts, load, now = self._setup, self._counts, self._setup.engine.load(), time.monotonic()
        elapsed_s, slot_s = max(now - self._last, 1e-6), setup.episodes.slot_s()
        sampled = load.generated_tokens + load.running_tokens
        tokens_per_s = max(sampled - self._last_tokens, 0) / elapsed_s  # below 0 where generations were aborted
        used_slots = (slot_s - self._last_slot_s) / elapsed_s
        self._last_tokens, self._last_slot_s, self._last = sampled, slot_s, now
        return Member(
            name=setup.actor,
            host=setup.provenance.host,
            instance_kind=setup.provenance.instance_kind,
            price_per_hour=setup.provenance.price_per_hour,
            engine=setup.engine.name,
            transport=self._actors.transport,
            policy_version=setup.engine.policy_version,
            num_episodes=setup.episodes.num_running,
            max_episodes=setup.episodes.max_running,
            used_slots=min(used_slots, setup.episodes.max_running),
            generated_tokens=load.generated_tokens,
            kept_tokens=setup.episodes.kept_tokens,
            tokens_per_s=tokens_per_s,
            kv_use=load.kv_use,
            state=MemberState.DRAINING if self._shutdown.requested.is_set() else MemberState.SERVING,
            started_at_s=self._started_at_s,
            served_s=now - self._first,
            last_pause_s=counts.last_pause_s,
            num_refreshes=counts.num_committed,
            refusal=counts.refusal,
        )


class RunChanged(RuntimeError):
    """The run's learner was started again with other settings or code: this actor must end, and join again."""


class LastKnown:
    """Reads the run's state; while it is missing or damaged, the last known state counts for a while."""

    def __init__(self, fleet: Fleet, patience_s: float, *, play_root: str) -> None:
        """`play_root` is that of the facts with which this actor joined; "": it plays whatever the run becomes."""
        self._fleet = fleet
        self._patience_s = patience_s
        self._play_root = play_root
        self._state = RunState.TRAINING
        self._known_at = time.monotonic()

    def state(self) -> RunState:
        """The run's state. Raises UnknownRun if it has been missing or damaged for longer than `patience_s`.

        Raises RunChanged if actors play by other facts now.
        """
        try:
            self._state, root = self._fleet.state_and_root()
            self._known_at = time.monotonic()
            if self._state in PLAYED and root and self._play_root and root != self._play_root:
                raise RunChanged(f"actors play by {root} now, and this one joined with {self._play_root}")
        except UnknownRun:
            if time.monotonic() - self._known_at > self._patience_s:
                raise
        return self._state


async def keep_beating(
    pulse: Pulse,
    *,
    actor: str,
    buffers: dict[str, ActorBuffer],
    fleet: Fleet,
    last_known: LastKnown,
    leases: Leases,
    interval: PollInterval,
) -> RunState:
    """Renew leases and membership every BEAT_S, or as `interval` allows; return the state of a run that has ended.

    Its calls have threads of their own, so that they do not wait for inserts. Raises EngineDied, RedisAway, RunChanged,
    UnknownRun.
    """
    threads = ThreadPoolExecutor(1 + len(buffers), thread_name_prefix="beat")
    call = partial(asyncio.get_running_loop().run_in_executor, threads)
    try:
        async with asyncio.TaskGroup() as group:
            renewing = [
                group.create_task(_keep_renewing(call, stream, buffer, leases, actor, interval))
                for stream, buffer in buffers.items()
            ]
            while (state := await call(last_known.state)) in PLAYED:
                interval.num_members = await call(fleet.beat, pulse.member())
                await asyncio.sleep(interval.seconds(BEAT_S, most_s=MEMBER_TTL_S / BEATS))
            for task in renewing:
                task.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        threads.shutdown(wait=False)
    return state


async def _keep_renewing(
    call: Callable[..., asyncio.Future[Any]],
    stream: str,
    buffer: ActorBuffer,
    leases: Leases,
    actor: str,
    interval: PollInterval,
) -> None:
    """Renew the leases of one stream; cancel groups whose lease was lost: another actor may play them already."""
    while True:
        mine = [(lease, task) for (of, _), (lease, task) in leases.playing.items() if of == stream]
        if mine:
            valid_ids = await call(buffer.heartbeat, actor, [lease for lease, _ in mine])
            for lease, task in mine:
                if lease.ticket.group_id not in valid_ids:
                    task.cancel()
        shortest_s = min((lease.ttl_s for lease, _ in mine), default=BEAT_S)
        await asyncio.sleep(interval.seconds(BEAT_S, most_s=shortest_s / BEATS))
