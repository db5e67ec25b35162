"""Stores finished episodes: those that end while others are being stored go together, in one exchange with Redis."""

import asyncio
from collections.abc import Sequence
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
                for each, result in zip(inserts, await _results(buffer, inserts), strict=True):
                    if each.result.done():
                        continue  # it was cancelled meanwhile
                    if isinstance(result, Exception):
                        each.result.set_exception(result)
                    else:
                        each.result.set_result(result)
        finally:
            del self._writing[buffer]


async def _results(buffer: ActorBuffer, inserts: list[Insert]) -> Sequence[InsertResult | Exception]:
    try:
        return await asyncio.to_thread(buffer.insert_all, [(each.lease, each.trajectory) for each in inserts])
    except InvalidTrajectory as error:
        if len(inserts) == 1:
            return [error]
        # One of them; those before it may be stored, and another insert of them changes nothing.
        return [result for each in inserts for result in await _results(buffer, [each])]
    except Exception as error:  # whatever it is, those who wait raise it
        return [error] * len(inserts)
