"""Stores finished episodes: those that end while others are being stored go together, in one exchange with Redis."""

import asyncio
from dataclasses import dataclass

from slipstream.common.records.trajectory import InvalidTrajectory, Trajectory
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.records.ticket import InsertResult, Lease


@dataclass(frozen=True, kw_only=True, slots=True)
class Insert:
    """An episode that waits to be stored."""

    lease: Lease
    trajectory: Trajectory
    result: asyncio.Future[InsertResult]


class Inserts:
    """The inserts of an actor: for each buffer one thread at a time, with all episodes that have ended until then."""

    def __init__(self) -> None:
        self._waiting: dict[ActorBuffer, list[Insert]] = {}
        self._writing: dict[ActorBuffer, asyncio.Task[None]] = {}

    async def insert(self, buffer: ActorBuffer, lease: Lease, trajectory: Trajectory) -> InsertResult:
        """Like `buffer.insert`, with whatever else waits. Raises InvalidTrajectory, RedisAway."""
        result: asyncio.Future[InsertResult] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(buffer, []).append(Insert(lease=lease, trajectory=trajectory, result=result))
        if buffer not in self._writing:
            self._writing[buffer] = asyncio.create_task(self._write(buffer), name="insert episodes")
        return await result

    async def _write(self, buffer: ActorBuffer) -> None:
        try:
            while inserts := [each for each in self._waiting.pop(buffer, []) if not each.result.done()]:
                await _store(buffer, inserts)
        finally:
            del self._writing[buffer]


async def _store(buffer: ActorBuffer, inserts: list[Insert]) -> None:
    try:
        results = await asyncio.to_thread(buffer.insert_all, [(each.lease, each.trajectory) for each in inserts])
    except InvalidTrajectory as error:
        if len(inserts) == 1:
            _fail(inserts, error)
        else:  # one of them; those before it may be stored, and another insert of them changes nothing
            for each in inserts:
                await _store(buffer, [each])
    except Exception as error:  # whatever it is, those who wait raise it
        _fail(inserts, error)
    else:
        for each, result in zip(inserts, results, strict=True):
            if not each.result.done():  # else it was cancelled
                each.result.set_result(result)


def _fail(inserts: list[Insert], error: Exception) -> None:
    for each in inserts:
        if not each.result.done():
            each.result.set_exception(error)
