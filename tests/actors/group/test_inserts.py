"""Episodes that end at about the same time are stored together, and each gets its own result."""

import asyncio
from collections.abc import Iterable

import msgspec
import pytest
import redis

from slipstream.actors.group.inserts import Inserts
from slipstream.common.records.trajectory import InvalidTrajectory, Trajectory
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.records.ticket import InsertResult, Lease
from tests.replay.records.attempts import Views, leased, make_buffer, ticket

MEMBERS = 6


@pytest.fixture
def buffer(redis_client: redis.Redis, run_id: str) -> Views:
    return make_buffer(redis_client, run_id).start(ticket(0, num_members=MEMBERS), ticket(1, num_members=MEMBERS))


async def insert_all(buffer: ActorBuffer, attempts: Iterable[tuple[Lease, Trajectory]]) -> list[object]:
    inserts = Inserts()
    waiting = [inserts.insert(buffer, lease, trajectory) for lease, trajectory in attempts]
    return await asyncio.gather(*waiting, return_exceptions=True)


def test_what_ends_meanwhile_goes_together(buffer: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges: list[int] = []
    store = buffer.actor.insert_all

    def counted(attempts: list[tuple[Lease, Trajectory]]) -> list[InsertResult]:
        exchanges.append(len(attempts))
        return store(attempts)

    monkeypatch.setattr(buffer.actor, "insert_all", counted)
    lease = leased(buffer)
    attempts = [(lease, buffer.attempt(lease, member)) for member in range(MEMBERS)]
    assert asyncio.run(insert_all(buffer.actor, attempts)) == [InsertResult.STORED] * MEMBERS
    assert sum(exchanges) == MEMBERS and len(exchanges) <= 2
    assert buffer.ledger.inserted == MEMBERS and buffer.audit() == []


def test_an_invalid_episode_fails_alone(buffer: Views) -> None:
    lease = leased(buffer)
    attempts = [buffer.attempt(lease, member) for member in range(MEMBERS)]
    attempts[3] = msgspec.structs.replace(attempts[3], tokens=b"")
    results = asyncio.run(insert_all(buffer.actor, [(lease, attempt) for attempt in attempts]))
    assert isinstance(results.pop(3), InvalidTrajectory)
    assert set(results) <= {InsertResult.STORED, InsertResult.DUPLICATE}
    assert buffer.ledger.inserted == MEMBERS - 1 and buffer.audit() == []


def test_one_lost_lease_leaves_the_other_groups_stored(buffer: Views) -> None:
    kept, lost = leased(buffer), leased(buffer)
    buffer.actor.release(lost)
    leased(buffer)
    attempts = [(lease, buffer.attempt(lease, 0)) for lease in (kept, lost)]
    assert asyncio.run(insert_all(buffer.actor, attempts)) == [InsertResult.STORED, InsertResult.FENCED]


def test_an_error_of_redis_reaches_all_who_wait(buffer: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: object) -> list[InsertResult]:
        raise redis.ConnectionError("away")

    monkeypatch.setattr(buffer.actor, "insert_all", away)
    lease = leased(buffer)
    attempts = [(lease, buffer.attempt(lease, member)) for member in range(MEMBERS)]
    errors = asyncio.run(insert_all(buffer.actor, attempts))
    assert [type(error) for error in errors] == [redis.ConnectionError] * MEMBERS


async def test_who_no_longer_waits_is_not_stored_and_the_next_one_is(buffer: Views) -> None:
    """A group that is cancelled stores its members itself, under its own lease."""
    lease, inserts = leased(buffer), Inserts()
    leaving = asyncio.create_task(inserts.insert(buffer.actor, lease, buffer.attempt(lease, 0)))
    await asyncio.sleep(0)  # it waits, and nothing was sent yet
    leaving.cancel()
    assert await inserts.insert(buffer.actor, lease, buffer.attempt(lease, 1)) is InsertResult.STORED
    assert buffer.ledger.inserted == 1
