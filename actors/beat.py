"""Staying alive in the others' eyes: leases renewed, and what this actor does said aloud."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actors.group import Stage
from actors.refresh import RefreshCounts
from common.actors_config import ActorsConfig
from common.shutdown import Shutdown
from replay.buffer import Buffer
from replay.fleet import Fleet, Member, MemberState, RunState
from replay.ticket import Lease

BEAT_S = 1.0


@dataclass(kw_only=True, slots=True)
class Leases:
    """The groups that this actor holds, each with the task that plays it, by (stream, group id)."""

    playing: dict[tuple[str, int], tuple[Lease, asyncio.Task[None]]] = field(default_factory=dict)

    def tasks(self) -> list[asyncio.Task[None]]:
        return [task for _, task in self.playing.values()]


class Pulse:
    """What an actor says of itself, from its first beat on."""

    def __init__(self, stage: Stage, *, counts: RefreshCounts, actors: ActorsConfig, shutdown: Shutdown) -> None:
        self._stage = stage
        self._counts = counts
        self._actors = actors
        self._shutdown = shutdown
        self._started_at_s = time.time()
        self._first = self._last = time.monotonic()
        self._last_tokens = 0

    def member(self) -> Member:
        """As of now. Raises EngineDied."""
        stage, counts, load, now = self._stage, self._counts, self._stage.engine.load(), time.monotonic()
        tokens_per_s = (load.generated_tokens - self._last_tokens) / max(now - self._last, 1e-6)
        self._last_tokens, self._last = load.generated_tokens, now
        return Member(
            name=stage.actor,
            host=stage.provenance.host,
            role="actor",
            zone=self._actors.zone,
            instance_kind=stage.provenance.instance_kind,
            price_per_hour=stage.provenance.price_per_hour,
            engine=stage.engine.name,
            transport=self._actors.transport,
            policy_version=stage.engine.policy_version,
            num_episodes=stage.episodes.num_running,
            max_episodes=self._actors.max_episodes,
            generated_tokens=load.generated_tokens,
            kept_tokens=stage.episodes.kept_tokens,
            tokens_per_s=tokens_per_s,
            kv_use=load.kv_use,
            state=MemberState.DRAINING if self._shutdown.requested.is_set() else MemberState.SERVING,
            started_at_s=self._started_at_s,
            served_s=now - self._first,
            last_pause_s=counts.last_pause_s,
            num_refreshes=counts.num_committed,
        )


async def keep_beating(
    pulse: Pulse, *, actor: str, buffers: dict[str, Buffer], fleet: Fleet, leases: Leases
) -> RunState:
    """Renew the leases and the membership every BEAT_S. Returns what the run's state is, once there is no more to do.

    Each buffer by itself, in a thread that is nobody else's: a server that stands still, and the inserts that wait for
    it, cost no lease on another. Raises EngineDied, RedisAway.
    """
    threads = ThreadPoolExecutor(1 + len(buffers), thread_name_prefix="beat")
    call = partial(asyncio.get_running_loop().run_in_executor, threads)
    try:
        async with asyncio.TaskGroup() as group:
            renewing = [
                group.create_task(_keep_renewing(call, stream, buffer, leases, actor))
                for stream, buffer in buffers.items()
            ]
            while (state := await call(fleet.run_state)) in (RunState.STARTING, RunState.TRAINING):
                await call(fleet.beat, pulse.member())
                await asyncio.sleep(BEAT_S)
            for task in renewing:
                task.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        threads.shutdown(wait=False)
    return state


async def _keep_renewing(
    call: Callable[..., asyncio.Future[Any]], stream: str, buffer: Buffer, leases: Leases, actor: str
) -> None:
    """A group whose lease was lost all the same is given up: others have it, and its tokens would count for nobody."""
    while True:
        mine = [(lease, task) for (of, _), (lease, task) in leases.playing.items() if of == stream]
        held = await call(buffer.heartbeat, actor, [lease for lease, _ in mine])
        for lease, task in mine:
            if lease.ticket.group_id not in held:
                task.cancel()
        await asyncio.sleep(BEAT_S)
