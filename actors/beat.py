"""Staying alive in the others' eyes: leases renewed, and what this actor does said aloud."""

import asyncio
import time
from dataclasses import dataclass, field

from actors.group import Stage
from actors.refresh import RefreshCounts
from common.config import ActorsConfig
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


async def keep_beating(
    stage: Stage,
    *,
    buffers: dict[str, Buffer],
    fleet: Fleet,
    leases: Leases,
    counts: RefreshCounts,
    actors: ActorsConfig,
    shutdown: Shutdown,
) -> None:
    """Renew the leases and the membership every BEAT_S. Returns when the run is over.

    A group whose lease was lost all the same is given up: others have it, and its tokens would count for nobody.
    """
    started_at_s, last_tokens, last_beat = time.time(), 0, time.monotonic()
    first_beat = last_beat
    while await asyncio.to_thread(fleet.run_state) in (RunState.STARTING, RunState.TRAINING):
        for stream, buffer in buffers.items():
            await _renew(stream, buffer, leases, stage.actor)
        load, now = stage.engine.load(), time.monotonic()
        member = Member(
            name=stage.actor,
            host=stage.provenance.host,
            role="actor",
            instance_kind=stage.provenance.instance_kind,
            price_per_hour=stage.provenance.price_per_hour,
            transport=actors.transport,
            policy_version=stage.engine.policy_version,
            num_episodes=stage.episodes.num_running,
            generated_tokens=load.generated_tokens,
            tokens_per_s=(load.generated_tokens - last_tokens) / max(now - last_beat, 1e-6),
            kv_use=load.kv_use,
            state=MemberState.DRAINING if shutdown.requested.is_set() else MemberState.SERVING,
            started_at_s=started_at_s,
            served_s=now - first_beat,
            last_pause_s=counts.last_pause_s,
            num_refreshes=counts.num_committed,
        )
        last_tokens, last_beat = load.generated_tokens, now
        await asyncio.to_thread(fleet.beat, member)
        await asyncio.sleep(BEAT_S)


async def _renew(stream: str, buffer: Buffer, leases: Leases, actor: str) -> None:
    mine = [(lease, task) for (of, _), (lease, task) in leases.playing.items() if of == stream]
    held = await asyncio.to_thread(buffer.heartbeat, actor, [lease for lease, _ in mine])
    for lease, task in mine:
        if lease.ticket.group_id not in held:
            task.cancel()
