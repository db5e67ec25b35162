"""Requests executed twice, or whose replies never come: each verb of the buffer has one effect all the same.

Here the wire loses them; `test_ledger` loses them for every verb.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from slipstream.common.process.connection import connect
from slipstream.common.records.trajectory import Outcome
from slipstream.replay.records.ledger import Ledger
from slipstream.replay.records.ticket import InsertResult, Lease
from slipstream.tools.lab.loopback_server import Server
from tests.proxy import Fault, Nth, Proxy
from tests.replay.records.attempts import Views, ids, leased, make_buffer, ticket


@pytest.fixture(scope="module")
def proxy(redis_server: Server) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as proxy:
        yield proxy


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Group 0 is claimed for step 1; 1 and 2 are ready; 3 is leased, its member 0 stored; 4 and 5 are queued."""

    buffer: Views  # through the proxy
    direct: Views
    client: redis.Redis
    lease: Lease

    def insert(self, member: int) -> InsertResult:
        return self.buffer.actor.insert(self.lease, self.buffer.attempt(self.lease, member))


def make_scene(run_id: str, *, client: redis.Redis, through: redis.Redis) -> Scene:
    tickets = [ticket(group_id, num_members=3 if group_id == 3 else 2) for group_id in range(6)]
    buffer = make_buffer(through, run_id).start(*tickets)
    for group_id in range(3):
        lease = leased(buffer)
        buffer.insert(lease)
        assert lease.ticket.group_id == group_id
    assert buffer.claim() == [0]
    lease = leased(buffer)
    buffer.insert(lease, 0)
    return Scene(buffer=buffer, direct=make_buffer(client, run_id), client=client, lease=lease)


def acts_as_the_newest_learner(scene: Scene) -> None:
    scene.buffer.learner.acquire_epoch()
    scene.buffer.learner.drop([5], "zero_variance")


def claims_what_is_lost(scene: Scene) -> list[int]:
    (blob,) = scene.direct.names("blob:1:0")
    scene.client.delete(blob)
    return ids(scene.buffer.learner.claim(2, 2, policy_version=0, max_lag=0))


def hands_in_twice(scene: Scene) -> list[int]:
    """Returns the turns of what the next holder continues."""
    for member in (1, 2):
        result = scene.buffer.actor.hand_in(scene.lease, scene.buffer.partial(scene.lease, member))
        assert result in (InsertResult.STORED, InsertResult.DUPLICATE)
    scene.direct.actor.release(scene.lease)
    return [len(partial.turns) for partial in leased(scene.direct).partials.values()]


def leases_a_poisoned_partial(scene: Scene) -> int:
    scene.direct.actor.hand_in(scene.lease, scene.direct.partial(scene.lease, 1))
    scene.direct.actor.release(scene.lease)
    (name,) = scene.direct.names("partial")
    scene.client.set(name, b"poison")
    return len(leased(scene.buffer).partials)


# Each returns what its caller hears, apart from what no two runs have in common.
VERBS: dict[str, Callable[[Scene], object]] = {
    "acquire_epoch": acts_as_the_newest_learner,
    "claim": lambda scene: ids(scene.buffer.learner.claim(2, 2, policy_version=0, max_lag=0)),
    "claim what is lost": claims_what_is_lost,
    "drop": lambda scene: scene.buffer.learner.drop([0, 1, 3, 4], "zero_variance"),
    "insert": lambda scene: scene.insert(1) in (InsertResult.STORED, InsertResult.DUPLICATE),
    "hand_in": hands_in_twice,
    "lease what was handed in, poisoned": leases_a_poisoned_partial,
}


def outcome(ledger: Ledger) -> dict[str, Any]:
    """The books, apart from what only counts repetitions."""
    return {name: value for name, value in ledger.to_dict().items() if name not in ("dedup_hits", "fenced_inserts")}


@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.RESET, Fault.DUPLICATE], ids=lambda fault: fault.value)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_whose_request_goes_astray_has_one_effect(
    verb: str, fault: Fault, proxy: Proxy, redis_server: Server, redis_client: redis.Redis, run_id: str
) -> None:
    """Whichever of its requests is struck."""
    with connect(proxy.url(redis_server.password)) as through:
        proxy.judge = Nth(Fault.NONE)
        scene = make_scene(f"{run_id}-whole", client=redis_client, through=through)
        expected_answer, expected = VERBS[verb](scene), outcome(scene.direct.learner.ledger())
        for nth in itertools.count():
            proxy.judge = Nth(Fault.NONE)
            scene = make_scene(f"{run_id}-{nth}", client=redis_client, through=through)
            struck = proxy.done[fault]
            proxy.judge = Nth(fault, nth=nth)
            answer = VERBS[verb](scene)
            if proxy.done[fault] == struck:  # it makes no more requests than nth
                break
            assert outcome(scene.direct.learner.ledger()) == expected, f"request {nth}"
            assert answer == expected_answer, f"request {nth}"
            assert scene.direct.audit() == []
        assert nth > 0, "no request was ever struck"


@pytest.mark.parametrize("fault", [Fault.WITHHOLD_REPLY, Fault.SWALLOW], ids=lambda fault: fault.value)
def test_an_insert_that_hears_nothing_is_made_again(
    fault: Fault, proxy: Proxy, redis_server: Server, redis_client: redis.Redis, run_id: str
) -> None:
    """The connection stays open and silent: only the client's own clock ends the wait."""
    with connect(proxy.url(redis_server.password)) as through:
        proxy.judge = Nth(Fault.NONE)
        scene = make_scene(run_id, client=redis_client, through=through)
        struck = proxy.done[fault]
        proxy.judge = Nth(fault, only=b"EVALSHA")
        result = scene.insert(1)
        assert proxy.done[fault] == struck + 1
        assert result is (InsertResult.DUPLICATE if fault is Fault.WITHHOLD_REPLY else InsertResult.STORED)
        assert scene.direct.learner.ledger().inserted == 8 and scene.direct.audit() == []


def life_of_a_run(buffer: Views) -> Iterator[str]:
    """Every verb at least once, each with something to do; yields the name of what was just done."""
    buffer.learner.acquire_epoch()
    yield "acquire_epoch"
    buffer.learner.open([ticket(group_id) for group_id in range(6)])
    yield "open"
    first, second, third, fourth, spare = (leased(buffer) for _ in range(5))
    yield "lease"
    buffer.insert(first)
    buffer.insert(second)
    buffer.insert(spare)  # ready to the end, for what takes more than it should
    buffer.insert(third, 0)
    yield "insert"
    assert buffer.actor.hand_in(fourth, buffer.partial(fourth, 0)) is InsertResult.STORED
    yield "hand_in"
    assert buffer.actor.heartbeat("a", [third, fourth]) == {2, 3}
    assert buffer.actor.fail(third, 1, attempt=0, outcome=Outcome.ENV_FAILURE, reason="why") == 1
    yield "fail"
    buffer.actor.release(fourth)
    yield "release"
    assert buffer.claim() == [0]
    yield "claim"
    assert buffer.claim(2, 1) == [1]
    yield "claim again"
    assert buffer.learner.settle(1) == 1
    yield "settle"
    buffer.learner.acquire_epoch()
    yield "acquire_epoch again"
    assert (buffer.learner.settle(1), buffer.learner.reopen(1)) == (0, 1)
    yield "reopen"
    assert buffer.claim(2, 1) == [1]
    yield "claim what was reopened"
    buffer.learner.drop([1], "zero_variance")
    yield "drop"
    fifth = leased(buffer)
    assert fifth.ticket.group_id == 3
    buffer.insert(fifth)
    yield "insert into what was released"
    assert buffer.claim(2, 1) == [4]
    yield "claim for the same step"
    assert buffer.learner.settle(2) == 1
    yield "settle again"
    assert buffer.people.requeue([2]) == 1
    yield "requeue"
    assert {leased(buffer).ticket.group_id for _ in range(2)} == {2, 5}
    yield "lease what was requeued"


def test_no_request_of_the_past_changes_anything_when_it_arrives_once_more(
    proxy: Proxy, redis_server: Server, redis_client: redis.Redis, run_id: str
) -> None:
    """A network that was cut for a while delivers what a client, long since answered, had sent before.

    A claim whose answer is lost would be settled, and counted as trained, without having been seen; a reopen
    would have groups trained twice. So after each verb everything that was ever sent is delivered again.
    """
    direct, writing = make_buffer(redis_client, run_id), list[list[bytes]]()

    def recorded(request: list[bytes]) -> Fault:
        if request[0].upper() in (b"EVALSHA", b"SET"):
            writing.append(request)
        return Fault.NONE

    proxy.judge = recorded
    num_delivered = 0
    with connect(proxy.url(redis_server.password)) as through:
        for verb in life_of_a_run(make_buffer(through, run_id)):
            before = outcome(direct.learner.ledger())
            for request in writing:
                with contextlib.suppress(redis.ResponseError):  # its answer is lost
                    redis_client.execute_command(*request)
                num_delivered += 1
                now = outcome(direct.learner.ledger())
                assert now == before, f"after {verb}: {request} changed {now.items() - before.items()}"
            assert direct.audit() == [], verb
    assert num_delivered > 200
    assert direct.learner.ledger().opened == 6 and direct.learner.ledger().trained == 2
