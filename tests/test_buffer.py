"""Each verb of the buffer, and each fault it must bear, on a real server."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import redis

from common.connection import connect
from common.trajectory import InvalidTrajectory, Outcome, StopReason
from replay.buffer import MAX_QUARANTINED, ORPHAN_TTL_S, Buffer
from replay.bulk import Bulk
from replay.keys import FencedOut, RunForgotten, key
from replay.listing import list_groups
from replay.sampler import Order, Reuse
from replay.server import start_server
from replay.ticket import Group, InsertResult, Lease
from tests.attempts import attempt_at, make_buffer, partial_of, ticket


@pytest.fixture
def buffer(redis_client: redis.Redis, run_id: str) -> Buffer:
    """A buffer whose leases outlast the test, with an epoch."""
    buffer = make_buffer(redis_client, run_id)
    buffer.acquire_epoch()
    return buffer


def leased(buffer: Buffer, actor: str = "a") -> Lease:
    lease = buffer.lease(actor)
    assert lease is not None
    return lease


def fill(buffer: Buffer, lease: Lease, run_id: str, *, policy_version: int = 0) -> None:
    for member in lease.missing:
        trajectory = attempt_at(lease, member, run_id=run_id, policy_version=policy_version)
        assert buffer.insert(lease, trajectory) is InsertResult.STORED


def make_ready(buffer: Buffer, run_id: str, *group_ids: int, policy_version: int = 0) -> None:
    buffer.open([ticket(group_id) for group_id in group_ids])
    for _ in group_ids:
        fill(buffer, leased(buffer), run_id, policy_version=policy_version)


def ids(groups: list[Group]) -> list[int]:
    return [group.ticket.group_id for group in groups]


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"nothing came of {condition} in {timeout_s} s"
        time.sleep(0.01)


def stored_keys(client: redis.Redis, run_id: str, kind: str) -> list[bytes]:
    return list(client.scan_iter(f"{key(run_id, 'train', kind)}:*"))


def test_a_group_goes_from_ticket_to_trained_and_leaves_no_key(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    assert buffer.open([ticket(0)]) == 1
    lease = leased(buffer)
    assert lease.missing == {0: 0, 1: 0}
    assert buffer.insert(lease, attempt_at(lease, 1, run_id=run_id)) is InsertResult.STORED
    assert buffer.claim(1, 1, policy_version=0, max_lag=0) == []
    assert buffer.insert(lease, attempt_at(lease, 0, run_id=run_id)) is InsertResult.STORED
    (group,) = buffer.claim(1, 1, policy_version=0, max_lag=0)
    assert group.ticket == ticket(0)
    assert group.trajectories == [attempt_at(lease, 0, run_id=run_id), attempt_at(lease, 1, run_id=run_id)]
    assert buffer.settle(1) == 1
    ledger = buffer.ledger()
    assert (ledger.opened, ledger.trained, ledger.inserted, ledger.trained_trajectories) == (1, 1, 2, 2)
    assert ledger.balanced and buffer.audit() == []
    assert stored_keys(redis_client, run_id, "group") + stored_keys(redis_client, run_id, "blob") == []


def test_an_opened_ticket_is_known_even_after_it_was_trained(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, 3, 4)
    buffer.claim(1, 2, policy_version=0, max_lag=0)
    buffer.settle(1)
    assert buffer.open([ticket(3), ticket(4), ticket(5)]) == 1
    assert buffer.ledger().queued == 1
    assert buffer.ledger().last_group_id == 5


def test_tickets_out_of_order_are_refused_rather_than_forgotten(buffer: Buffer) -> None:
    with pytest.raises(ValueError, match=r"rising order of group_id, got \[2, 1\]"):
        buffer.open([ticket(2), ticket(1)])


def test_leases_go_out_oldest_ticket_first_and_one_actor_each(buffer: Buffer) -> None:
    buffer.open([ticket(9), ticket(10)])
    first, second = leased(buffer, "a"), leased(buffer, "b")
    assert (first.ticket.group_id, second.ticket.group_id) == (9, 10)
    assert second.fence > first.fence
    assert buffer.lease("c") is None


def test_an_expired_lease_returns_only_the_missing_members(redis_client: redis.Redis, run_id: str) -> None:
    buffer = make_buffer(redis_client, run_id, lease_ttl_s=0.05)
    buffer.acquire_epoch()
    buffer.open([ticket(0, num_members=3)])
    dead = leased(buffer, "dead")
    assert buffer.insert(dead, attempt_at(dead, 1, run_id=run_id)) is InsertResult.STORED
    wait_until(lambda: buffer.heartbeat("someone", []) == set() and buffer.ledger().queued == 1)
    lease = leased(make_buffer(redis_client, run_id), "heir")
    assert lease.missing == {0: 1, 2: 1}
    ledger = buffer.ledger()
    assert (ledger.expired_leases, ledger.redone_members, ledger.held_trajectories) == (1, 2, 1)
    assert buffer.insert(dead, attempt_at(dead, 0, run_id=run_id)) is InsertResult.FENCED
    fill(buffer, lease, run_id)
    (group,) = buffer.claim(1, 1, policy_version=0, max_lag=0)
    assert [(t.member, t.attempt) for t in group.trajectories] == [(0, 1), (1, 0), (2, 1)]
    assert buffer.audit() == []


def test_a_task_that_outlives_every_lease_is_dropped_when_its_attempts_are_spent(
    redis_client: redis.Redis, run_id: str
) -> None:
    buffer = make_buffer(redis_client, run_id, lease_ttl_s=0.02, max_attempts=2)
    buffer.acquire_epoch()
    buffer.open([ticket(0)])
    for _ in range(2):
        lease = leased(buffer)
        wait_until(lambda: buffer.heartbeat("someone", []) == set() and buffer.ledger().leased == 0)
    assert lease.missing == {0: 1, 1: 1}
    assert buffer.ledger().dropped == {"lease_expired": 1}
    assert buffer.audit() == []


def test_a_heartbeat_keeps_the_leases_that_are_held_and_names_them(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    buffer.open([ticket(0), ticket(1)])
    first, second = leased(buffer), leased(buffer)
    buffer.release(second)
    deadlines = key(run_id, "train", "leased")
    deadline_ms = redis_client.zscore(deadlines, "0")
    redis_client.zadd(deadlines, {"0": deadline_ms - 500_000})
    assert buffer.heartbeat("b", [first]) == set()
    assert redis_client.zscore(deadlines, "0") == deadline_ms - 500_000
    assert buffer.heartbeat("a", [first, second]) == {0}
    assert redis_client.zscore(deadlines, "0") >= deadline_ms


def test_a_late_heartbeat_saves_a_lease_that_nobody_missed(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    redis_client.zadd(key(run_id, "train", "leased"), {"0": 1.0})
    assert buffer.heartbeat("a", [lease]) == {0}
    assert buffer.ledger().leased == 1


def test_a_zombie_is_fenced_and_its_payload_removed(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    buffer.open([ticket(0)])
    zombie = leased(buffer, "zombie")
    buffer.release(zombie)
    heir = leased(buffer, "heir")
    assert buffer.insert(zombie, attempt_at(zombie, 0, run_id=run_id)) is InsertResult.FENCED
    assert stored_keys(redis_client, run_id, "blob") == []
    assert buffer.insert(heir, attempt_at(heir, 0, run_id=run_id)) is InsertResult.STORED
    assert buffer.insert(zombie, attempt_at(zombie, 0, run_id=run_id)) is InsertResult.FENCED
    assert buffer.ledger().fenced_inserts == 2
    assert len(stored_keys(redis_client, run_id, "blob")) == 1
    assert buffer.audit() == []


def test_an_insert_sent_twice_has_one_effect(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    trajectory = attempt_at(lease, 0, run_id=run_id)
    assert buffer.insert(lease, trajectory) is InsertResult.STORED
    assert buffer.insert(lease, trajectory) is InsertResult.DUPLICATE
    last = attempt_at(lease, 1, run_id=run_id)
    assert buffer.insert(lease, last) is InsertResult.STORED
    assert buffer.insert(lease, last) is InsertResult.DUPLICATE
    ledger = buffer.ledger()
    assert (ledger.inserted, ledger.dedup_hits, ledger.ready) == (2, 2, 1)
    assert [redis_client.ttl(blob) for blob in stored_keys(redis_client, run_id, "blob")] == [-1, -1]


def test_a_second_try_cannot_change_what_is_stored(buffer: Buffer, run_id: str) -> None:
    buffer.open([ticket(0, num_members=1)])
    lease = leased(buffer)
    first = attempt_at(lease, 0, run_id=run_id, num_sampled=2)
    assert buffer.insert(lease, first) is InsertResult.STORED
    assert buffer.insert(lease, attempt_at(lease, 0, run_id=run_id, num_sampled=3)) is InsertResult.DUPLICATE
    (group,) = buffer.claim(1, 1, policy_version=0, max_lag=0)
    assert group.trajectories == [first]


def test_a_payload_without_a_commit_expires_and_is_never_seen(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    orphan = key(run_id, "train", "blob", 0, 0, 0, lease.fence)
    redis_client.set(orphan, b"half an insert", ex=ORPHAN_TTL_S, nx=True)
    assert 0 < redis_client.ttl(orphan) <= ORPHAN_TTL_S
    assert buffer.ledger().inserted == 0
    assert buffer.audit() == []


def test_a_learner_is_told_that_the_server_forgot_the_run(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    """As one without a file of its own does that is started again: nobody would ever claim what nobody plays."""
    buffer.open([ticket(0)])
    redis_client.delete(*redis_client.scan_iter(f"slipstream:{{{run_id}}}*"))
    with pytest.raises(RunForgotten, match=r"has forgotten run .* Start the learner again"):
        buffer.claim(1, 1, policy_version=0, max_lag=0)
    assert buffer.acquire_epoch() == 1
    assert buffer.open([ticket(0)]) == 1


@pytest.mark.parametrize("verb", ["insert", "hand_in"])
@pytest.mark.parametrize("record", ["", "0:{fence}", "0:{fence}:0:7:5:1:x:a", "-1:{fence}:0:7:5:1:100:a", "::::::::"])
def test_what_is_no_record_is_refused_and_changes_nothing(
    buffer: Buffer, redis_client: redis.Redis, run_id: str, verb: str, record: str
) -> None:
    buffer.open([ticket(0, num_members=1)])
    lease = leased(buffer)
    blob = key(run_id, "train", "blob", 0, 0, 0, lease.fence)
    redis_client.set(blob, b"payload", ex=60)
    with pytest.raises(redis.ResponseError, match="no record"):
        buffer._scripts[verb](keys=[buffer._base, blob], args=[0, 0, record.format(fence=lease.fence)])
    assert (buffer.ledger().inserted, buffer.ledger().leased) == (0, 1)
    assert buffer.audit() == []


def test_every_verb_sent_twice_has_one_effect(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    """What a client does that lost the reply: the same script with the same arguments, once more."""

    def twice(verb: str, *arguments: object) -> object:
        first = buffer._call(verb, *arguments)
        assert buffer._call(verb, *arguments) is not None or first is None
        assert buffer.audit() == []
        return first

    tickets = [part for group_id in (0, 1, 2, 3) for part in (group_id, 1, msgspec.msgpack.encode(group_id))]
    assert twice("open", 1, 3, *tickets) == 4
    assert buffer.ledger().opened == 4
    fence, *_ = twice("lease", "a", "request-1", 60_000)  # type: ignore[misc]
    assert (buffer.ledger().leased, buffer.ledger().queued) == (1, 3)
    twice("release", 0, fence)
    assert (buffer.ledger().leased, buffer.ledger().queued) == (0, 4)
    assert buffer._call("lease", "a", "request-1", 60_000) is None  # given back since: not the same lease any more

    fences = [int(buffer._call("lease", "a", f"request-{n}", 60_000)[0]) for n in (2, 3, 4)]
    assert twice("fail", 0, 0, 0, fences[0], "env_failure", b"what happened") == 1
    assert buffer.ledger().redone_members == 1
    assert twice("fail", 0, 0, 1, fences[0], "env_failure", b"what happened") == 2
    twice("fail", 0, 0, 2, fences[0], "env_failure", b"what happened")
    assert buffer.ledger().dropped == {"env_failure": 1}
    for group_id, fence in ((1, fences[1]), (2, fences[2])):
        blob = key(run_id, "train", "blob", group_id, 0, 0, fence)
        redis_client.set(blob, b"payload", ex=60)
        for expected in (b"stored", b"duplicate"):
            arguments = [group_id, 0, f"0:{fence}:0:7:5:1:100:a"]
            assert buffer._scripts["insert"](keys=[buffer._base, blob], args=arguments) == expected
    assert buffer.ledger().ready == 2

    rest = (0, "oldest", 0, 1, 0, 0)  # oldest version, order, seed, and each group once
    claimed = twice("claim", 1, 1, 5, 1, *rest)
    assert buffer._call("claim", 1, 1, 5, 1, *rest) == claimed
    assert (buffer.ledger().claimed, buffer.ledger().ready) == (1, 1)
    assert twice("reopen", 1, 4, 100, 9) == 1
    assert (buffer.ledger().claimed, buffer.ledger().ready) == (0, 2)
    twice("claim", 1, 2, 5, 2, *rest)
    assert twice("quarantine", 1, 4, 1, b"why", MAX_QUARANTINED) == 1
    assert buffer.ledger().quarantined == 1
    assert twice("requeue", "request-1", 1) == 1
    assert (buffer.ledger().quarantined, buffer.ledger().queued) == (0, 2)
    buffer._call("lease", "a", "request-5", 60_000)
    assert buffer._call("requeue", "request-1", 1) == 1  # leased since: what comes late takes nothing away
    assert buffer.ledger().leased == 1
    assert twice("settle", 1, 5, 100) == 1
    assert buffer.ledger().trained == 1
    twice("drop", 1, 5, "too_old", 3)
    assert buffer.ledger().dropped == {"env_failure": 1, "too_old": 1}
    assert buffer.ledger().opened == 4


def test_a_claim_takes_all_or_nothing_oldest_finished_first(buffer: Buffer, run_id: str) -> None:
    buffer.open([ticket(0), ticket(1), ticket(2)])
    slow, quick, quicker = leased(buffer), leased(buffer), leased(buffer)
    fill(buffer, quicker, run_id)
    assert buffer.claim(1, 2, policy_version=0, max_lag=0) == []
    fill(buffer, quick, run_id)
    fill(buffer, slow, run_id)
    assert ids(buffer.claim(1, 2, policy_version=0, max_lag=0)) == [2, 1]
    assert ids(buffer.claim(1, 1, policy_version=0, max_lag=0)) == [0]


def test_a_claim_that_raised_on_its_way_is_the_same_claim_when_tried_again(
    buffer: Buffer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ready(buffer, run_id, 0, 1)

    def cut(*_: object) -> None:
        raise redis.ConnectionError("the connection broke before the payloads came")

    with monkeypatch.context() as patched:
        patched.setattr(Bulk, "read", cut)
        with pytest.raises(redis.ConnectionError):
            buffer.claim(1, 1, policy_version=0, max_lag=0)
    assert buffer.ledger().claimed == 1
    assert ids(buffer.claim(1, 1, policy_version=0, max_lag=0)) == [0]
    assert ids(buffer.claim(1, 1, policy_version=0, max_lag=0)) == [1]


def test_a_copy_of_a_claim_that_arrives_late_takes_nothing(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, 0, 1, 2)
    assert ids(buffer.claim(1, 1, policy_version=0, max_lag=0)) == [0]
    assert buffer.claim(2, 9, policy_version=0, max_lag=0) == []
    rest = (0, "oldest", 0, 1, 0, 0)  # oldest version, order, seed, and each group once
    assert buffer._call("claim", 1, 0, 1, 1, *rest) == []  # held up on its way since step 1
    assert buffer._call("claim", 1, 1, 2, 1, *rest) == []  # the one that found too few: it was answered so
    assert (buffer.ledger().claimed, buffer.ledger().ready) == (1, 2)
    assert ids(buffer.claim(2, 2, policy_version=0, max_lag=0)) == [1, 2]


def test_a_claim_drops_groups_older_than_max_lag(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, 0, policy_version=5)
    make_ready(buffer, run_id, 1, policy_version=6)
    assert ids(buffer.claim(9, 1, policy_version=10, max_lag=4)) == [1]
    assert buffer.ledger().dropped == {"too_old": 1}
    assert buffer.ledger().dropped_trajectories == {"too_old": 2}


def test_the_books_say_what_each_account_took_to_make(buffer: Buffer, run_id: str) -> None:
    """Each trajectory is 4 tokens, 1 turn and 100 ms; half of group 2 is never made."""
    for group_id, policy_version in ((0, 5), (1, 9)):
        make_ready(buffer, run_id, group_id, policy_version=policy_version)
    buffer.open([ticket(2)])
    lease = leased(buffer)
    buffer.insert(lease, attempt_at(lease, 0, run_id=run_id))
    assert buffer.ledger().tokens == {"finished": 16}
    buffer.claim(1, 1, policy_version=9, max_lag=3)  # sweeps group 0
    buffer.settle(1)
    buffer.drop([2], "poison")
    ledger = buffer.ledger()
    assert ledger.tokens == {"finished": 16, "dropped:too_old": 8, "trained": 8, "dropped:poison": 4}
    assert ledger.turns == {"finished": 4, "dropped:too_old": 2, "trained": 2, "dropped:poison": 1}
    assert ledger.duration_ms == {"finished": 400, "dropped:too_old": 200, "trained": 200, "dropped:poison": 100}


@pytest.mark.parametrize(("duration_s", "booked_ms"), [(-1.0, 0), (float("nan"), 0), (1e300, 10**12)])
def test_a_clock_that_is_wrong_spoils_no_books(buffer: Buffer, run_id: str, duration_s: float, booked_ms: int) -> None:
    buffer.open([ticket(0, num_members=1)])
    lease = leased(buffer)
    attempt = msgspec.structs.replace(attempt_at(lease, 0, run_id=run_id), duration_s=duration_s)
    assert buffer.insert(lease, attempt) is InsertResult.STORED
    assert buffer.ledger().duration_ms == ({"finished": booked_ms} if booked_ms else {})


def test_a_claim_takes_groups_in_the_order_that_is_asked_for(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, *range(6))
    buffer.prioritise({1: 0.5, 2: -3.0, 3: 0.5, 4: 1e300, 0: float("inf"), 77: 9.0})

    def claimed(order: Order, num_groups: int, seed: int = 0) -> list[int]:
        groups = buffer.claim(1, num_groups, policy_version=0, max_lag=0, order=order, seed=seed)
        assert buffer.reopen(0) == num_groups and buffer.audit() == []
        return ids(groups)

    assert claimed(Order.OLDEST, 3) == [0, 1, 2]
    assert claimed(Order.FRESHEST, 3) == [5, 4, 3]
    assert claimed(Order.PRIORITISED, 6) == [0, 5, 4, 1, 3, 2]  # 5 has no score; 0 finished first
    draws = [claimed(Order.UNIFORM, 3, seed) for seed in range(40)]
    assert draws == [claimed(Order.UNIFORM, 3, seed) for seed in range(40)]
    assert sorted(claimed(Order.UNIFORM, 6, seed=1)) == list(range(6))
    assert {draw[0] for draw in draws} == {draw[2] for draw in draws} == set(range(6))
    assert len({tuple(draw) for draw in draws}) > 20


def test_a_score_that_is_no_number_is_refused(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, 0)
    with pytest.raises(ValueError, match=r"got NaN for groups \[0\]; leave them out"):
        buffer.prioritise({0: float("nan")})


def twice_each(buffer: Buffer, step: int, num_groups: int, *, policy_version: int = 0) -> list[int]:
    reuse = Reuse(max_uses=2, samples_per_insert=0, error_buffer=0)
    return ids(buffer.claim(step, num_groups, policy_version=policy_version, max_lag=0, reuse=reuse))


def test_a_group_with_uses_left_stays_ready_and_is_used_once_a_step(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, 0, 1, 2)
    assert twice_each(buffer, 1, 2) == [0, 1]
    assert (buffer.ledger().ready, buffer.ledger().claimed) == (3, 0)
    assert twice_each(buffer, 1, 2) == []  # of those that step 1 has not used there is one
    assert twice_each(buffer, 1, 1) == [2]
    assert twice_each(buffer, 2, 2) == [0, 1]
    assert buffer.settle(1) == 0
    ledger = buffer.ledger()
    assert (ledger.ready, ledger.claimed, ledger.claims, ledger.ready_uses) == (1, 2, 5, 1)
    assert buffer.settle(2) == 2
    assert buffer.ledger().trained == 2 and buffer.audit() == []


def test_a_resumed_learner_takes_back_the_uses_of_later_steps_only(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, 0, 1, 2)
    assert (twice_each(buffer, 1, 2), twice_each(buffer, 2, 2), twice_each(buffer, 3, 1)) == ([0, 1], [0, 1], [2])
    assert buffer.settle(1) == 0
    buffer.acquire_epoch()
    assert buffer.reopen(1) == 3
    ledger = buffer.ledger()
    assert (ledger.ready, ledger.claims, ledger.ready_uses) == (3, 2, 2)
    assert twice_each(buffer, 2, 3) == [0, 1, 2]
    assert (buffer.ledger().claimed, buffer.ledger().ready_uses) == (2, 1)
    assert buffer.audit() == []


def test_what_a_model_learned_from_is_retired_and_never_dropped(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, 0, 1)
    assert twice_each(buffer, 1, 1) == [0]
    assert twice_each(buffer, 2, 1, policy_version=1) == []  # both have grown too old
    ledger = buffer.ledger()
    assert (ledger.dropped, ledger.claimed, ledger.ready) == ({"too_old": 1}, 1, 0)
    assert buffer.settle(1) == 1
    assert buffer.ledger().trained == 1 and buffer.audit() == []


def test_a_drop_takes_back_the_use_that_it_was_claimed_for_and_no_earlier_one(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, 0, 1)
    assert twice_each(buffer, 1, 1) == [0]
    assert twice_each(buffer, 2, 2) == [0, 1]
    buffer.drop([0, 1], "zero_variance")
    ledger = buffer.ledger()
    assert (ledger.dropped, ledger.claimed, ledger.ready) == ({"zero_variance": 1}, 1, 0)
    assert buffer.settle(1) == 1  # in step 1 a model learned from group 0
    assert buffer.audit() == []


def test_a_group_that_a_model_learned_from_can_be_neither_set_aside_nor_begun_anew(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    make_ready(buffer, run_id, 0)
    assert twice_each(buffer, 1, 1) == [0]
    assert buffer.requeue([0]) == 0
    assert not make_buffer(redis_client, run_id).quarantine(0, "looks odd")
    ledger = buffer.ledger()
    assert (ledger.claimed, ledger.ready, ledger.quarantined) == (1, 0, 0)
    assert buffer.settle(1) == 1
    assert buffer.audit() == []


def test_the_limiter_lets_a_claim_wait_for_the_inserts_that_pay_for_it(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, *range(4))

    def claim(step: int, num_groups: int) -> list[int]:
        reuse = Reuse(max_uses=4, samples_per_insert=1.5, error_buffer=1)
        return ids(buffer.claim(step, num_groups, policy_version=0, max_lag=0, reuse=reuse))

    assert claim(1, 4) == [0, 1, 2, 3]
    assert claim(2, 4) == []  # 8 > 1.5 * 4 + 1
    assert claim(2, 3) == [0, 1, 2]  # 7 <= 7
    assert claim(3, 1) == []
    make_ready(buffer, run_id, 4)
    assert claim(3, 1) == [0]  # 8 <= 1.5 * 5 + 1
    assert buffer.ledger().claims == 8 and buffer.audit() == []
    assert buffer.reopen(1) == 3
    assert buffer.ledger().claims == 4


def test_a_sweep_of_many_old_groups_is_not_made_in_one_go(buffer: Buffer, run_id: str) -> None:
    buffer.open([ticket(group_id, num_members=1) for group_id in range(250)])
    for _ in range(250):
        fill(buffer, leased(buffer), run_id)
    assert buffer.claim(1, 1, policy_version=1, max_lag=0) == []
    assert buffer.ledger().dropped == {"too_old": 250}
    assert buffer.audit() == []


def test_the_oldest_member_decides_the_lag_of_its_group(buffer: Buffer, run_id: str) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    buffer.insert(lease, attempt_at(lease, 0, run_id=run_id, policy_version=9))
    buffer.insert(lease, attempt_at(lease, 1, run_id=run_id, policy_version=3))
    assert buffer.claim(1, 1, policy_version=9, max_lag=5) == []
    assert buffer.ledger().dropped == {"too_old": 1}


def test_a_drop_gives_its_slot_back(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, 0, 1)
    buffer.claim(1, 2, policy_version=0, max_lag=0)
    assert buffer.ledger().claimed == 2
    buffer.drop([0], "zero_variance")
    buffer.drop([0], "zero_variance")
    assert buffer.ledger().claimed == 1
    assert buffer.ledger().dropped_trajectories == {"zero_variance": 2}
    assert buffer.audit() == []


def test_a_drop_takes_groups_in_any_state_and_fences_their_holders(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, 0)
    buffer.open([ticket(1), ticket(2)])
    lease = leased(buffer)
    assert buffer.insert(lease, attempt_at(lease, 0, run_id=run_id)) is InsertResult.STORED
    buffer.drop([0, 1, 2, 77], "abandoned")
    assert buffer.insert(lease, attempt_at(lease, 1, run_id=run_id)) is InsertResult.FENCED
    assert buffer.heartbeat("a", [lease]) == set()
    assert buffer.ledger().dropped == {"abandoned": 3}
    assert buffer.audit() == []


def test_a_learner_from_an_older_checkpoint_finds_the_rest_ready_again_in_order(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    buffer.open([ticket(group_id) for group_id in range(4)])
    leases = [leased(buffer) for _ in range(4)]
    for group_id in (0, 3, 1, 2):
        fill(buffer, leases[group_id], run_id)
    assert ids(buffer.claim(1, 1, policy_version=0, max_lag=0)) == [0]
    assert ids(buffer.claim(2, 2, policy_version=0, max_lag=0)) == [3, 1]
    buffer.settle(1)
    resumed = make_buffer(redis_client, run_id)
    resumed.acquire_epoch()
    assert resumed.reopen(1) == 2
    assert ids(resumed.claim(2, 3, policy_version=0, max_lag=0)) == [3, 1, 2]
    resumed.settle(2)
    assert resumed.ledger().trained == 4
    assert resumed.audit() == []


def test_an_older_learner_is_fenced_out_of_every_verb(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    make_ready(buffer, run_id, 0)
    newer = make_buffer(redis_client, run_id)
    assert newer.acquire_epoch() == 2
    with pytest.raises(FencedOut, match="holds epoch 1 and was FENCEDOUT by epoch 2"):
        buffer.open([ticket(1)])
    with pytest.raises(FencedOut):
        buffer.claim(1, 1, policy_version=0, max_lag=0)
    with pytest.raises(FencedOut):
        buffer.drop([0], "zero_variance")
    with pytest.raises(FencedOut):
        buffer.settle(1)
    with pytest.raises(FencedOut):
        buffer.reopen(0)
    buffer.adopt_epoch(2)
    assert ids(buffer.claim(1, 1, policy_version=0, max_lag=0)) == [0]


def test_failed_attempts_are_redone_until_they_run_out(buffer: Buffer, run_id: str) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    assert buffer.insert(lease, attempt_at(lease, 1, run_id=run_id)) is InsertResult.STORED
    assert buffer.fail(lease, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="the shop is closed") == 1
    buffer.release(lease)
    lease = leased(buffer, "another actor")
    assert lease.missing == {0: 1}
    assert buffer.fail(lease, 0, attempt=1, outcome=Outcome.TRUNCATED, reason="too slow") == 2
    assert buffer.fail(lease, 0, attempt=2, outcome=Outcome.ENV_FAILURE, reason="closed again") is None
    assert buffer.heartbeat("another actor", [lease]) == set()
    ledger = buffer.ledger()
    assert (ledger.dropped, ledger.dropped_trajectories) == ({"env_failure": 1}, {"env_failure": 1})
    assert ledger.redone_members == 2
    assert [failure.reason for failure in buffer.failures()] == ["closed again", "too slow", "the shop is closed"]
    assert buffer.audit() == []


def test_a_reason_that_is_no_unicode_is_kept_as_far_as_it_is(buffer: Buffer) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    assert buffer.fail(lease, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="no item \ud83d") == 1
    assert buffer.quarantine(0, "looks \ud83d")
    assert buffer.failures()[0].reason == "no item ?"
    assert buffer.quarantined()[0].reason == "looks ?"


def test_an_attempt_reported_as_failed_can_no_longer_be_inserted(buffer: Buffer, run_id: str) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    assert buffer.fail(lease, 0, attempt=0, outcome=Outcome.INFRA_FAILURE, reason="engine died") == 1
    assert buffer.insert(lease, attempt_at(lease, 0, run_id=run_id)) is InsertResult.FENCED


def test_release_gives_the_missing_members_back_at_once(buffer: Buffer, run_id: str) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    buffer.insert(lease, attempt_at(lease, 0, run_id=run_id))
    buffer.release(lease)
    assert leased(buffer).missing == {1: 0}
    assert buffer.ledger().redone_members == 0


def test_the_next_lease_goes_on_from_what_a_preempted_actor_handed_in(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    buffer.open([ticket(0)])
    leaving = leased(buffer, "leaving")
    partial = partial_of(leaving, 1, run_id=run_id)
    assert buffer.hand_in(leaving, partial) is InsertResult.STORED
    assert buffer.hand_in(leaving, partial) is InsertResult.DUPLICATE
    assert buffer.ledger().inserted == 0
    buffer.release(leaving)
    heir = leased(buffer, "heir")
    assert (heir.missing, heir.partials) == ({0: 0, 1: 0}, {1: partial})
    assert buffer.hand_in(leaving, partial_of(leaving, 0, run_id=run_id)) is InsertResult.FENCED
    fill(buffer, heir, run_id)
    ledger = buffer.ledger()
    assert (ledger.partials_handed_in, ledger.partials_resumed, ledger.partials_held) == (1, 1, 0)
    assert (ledger.partials_discarded, ledger.ready) == ({}, 1)
    assert stored_keys(redis_client, run_id, "partial") == []
    assert buffer.audit() == []


def test_a_newer_partial_takes_the_place_of_an_older(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    buffer.open([ticket(0)])
    for num_sampled in (2, 5):
        lease = leased(buffer)
        buffer.hand_in(lease, partial_of(lease, 0, run_id=run_id, num_sampled=num_sampled))
        buffer.release(lease)
    (partial,) = leased(buffer).partials.values()
    assert partial.num_tokens == 7
    assert buffer.ledger().partials_discarded == {"superseded": 1}
    assert len(stored_keys(redis_client, run_id, "partial")) == 1
    assert buffer.audit() == []


def test_a_partial_under_whose_lease_the_member_was_stored_after_all_was_never_resumed(
    buffer: Buffer, run_id: str
) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    buffer.hand_in(lease, partial_of(lease, 0, run_id=run_id))
    assert buffer.insert(lease, attempt_at(lease, 0, run_id=run_id)) is InsertResult.STORED
    assert buffer.hand_in(lease, partial_of(lease, 0, run_id=run_id)) is InsertResult.FENCED
    ledger = buffer.ledger()
    assert (ledger.partials_resumed, ledger.partials_discarded) == (0, {"superseded": 1})
    assert buffer.audit() == []


def test_an_attempt_whose_replay_does_not_match_begins_anew_and_is_counted(buffer: Buffer, run_id: str) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    buffer.hand_in(lease, partial_of(lease, 0, run_id=run_id))
    buffer.release(lease)
    lease = leased(buffer)
    assert buffer.fail(lease, 0, attempt=0, outcome=Outcome.REPLAY_MISMATCH, reason="another shop") == 1
    assert buffer.fail(lease, 0, attempt=0, outcome=Outcome.REPLAY_MISMATCH, reason="another shop") == 1
    buffer.release(lease)
    lease = leased(buffer)
    assert (lease.missing, lease.partials) == ({0: 1, 1: 0}, {})
    ledger = buffer.ledger()
    assert (ledger.failed, ledger.partials_discarded) == ({"replay_mismatch": 1}, {"replay_mismatch": 1})
    assert ledger.tokens == {"discarded:replay_mismatch": 4}
    assert buffer.audit() == []


def test_a_partial_outlives_an_expired_lease_until_the_attempts_are_spent(
    redis_client: redis.Redis, run_id: str
) -> None:
    buffer = make_buffer(redis_client, run_id, lease_ttl_s=0.05, max_attempts=3)
    buffer.acquire_epoch()
    buffer.open([ticket(0, num_members=1)])
    lease = leased(buffer)
    partial = partial_of(lease, 0, run_id=run_id)
    assert buffer.hand_in(lease, partial) is InsertResult.STORED
    for attempt in (1, 2):
        wait_until(lambda: buffer.heartbeat("someone", []) == set() and buffer.ledger().queued == 1)
        lease = leased(buffer)
        assert (lease.missing, lease.partials) == ({0: attempt}, {0: partial})
    wait_until(lambda: buffer.heartbeat("someone", []) == set() and buffer.ledger().leased == 0)
    ledger = buffer.ledger()
    assert (ledger.dropped, ledger.partials_discarded) == ({"lease_expired": 1}, {"lease_expired": 1})
    assert buffer.audit() == []


def test_a_partial_that_is_lost_or_poisoned_is_discarded_and_its_member_begins_anew(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    for member in (0, 1):
        buffer.hand_in(lease, partial_of(lease, member, run_id=run_id))
    buffer.release(lease)
    redis_client.delete(*stored_keys(redis_client, run_id, "partial:0:0"))
    redis_client.set(stored_keys(redis_client, run_id, "partial:0:1")[0], b"\x00garbage")
    lease = leased(buffer)
    assert (lease.missing, lease.partials) == ({0: 0, 1: 0}, {})
    assert buffer.ledger().partials_discarded == {"lost_payload": 1, "poison": 1}
    assert buffer.audit() == []


def test_only_what_was_preempted_is_handed_in(buffer: Buffer, run_id: str) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    with pytest.raises(InvalidTrajectory, match=r"outcome policy is not preempted: .*hand_in\(\) what was preempted"):
        buffer.hand_in(lease, attempt_at(lease, 0, run_id=run_id))
    with pytest.raises(InvalidTrajectory, match="no turns: nothing was sampled"):
        buffer.hand_in(lease, msgspec.structs.replace(partial_of(lease, 0, run_id=run_id), turns=[]))
    with pytest.raises(InvalidTrajectory, match="outcome preempted is not policy"):
        buffer.insert(lease, partial_of(lease, 0, run_id=run_id))


def test_poison_is_set_aside_with_its_sender_and_the_claim_goes_on(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    make_ready(buffer, run_id, 0, 1, 2)
    for group_id, payload in (
        (0, b"\x00garbage"),
        (1, redis_client.get(stored_keys(redis_client, run_id, "blob:2:0")[0])),
    ):
        (blob,) = stored_keys(redis_client, run_id, f"blob:{group_id}:0")
        redis_client.set(blob, payload)
    assert ids(buffer.claim(1, 3, policy_version=0, max_lag=0)) == [2]
    stranger, garbage = buffer.quarantined()
    assert (garbage.actor, garbage.member) == ("a", 0)
    assert "shorter than its header" in garbage.reason or "magic" in garbage.reason
    assert "the ticket says" in stranger.reason
    ledger = buffer.ledger()
    assert (ledger.quarantined, ledger.claimed, ledger.held_trajectories) == (2, 1, 6)
    assert buffer.audit() == []


def test_poison_is_set_aside_also_where_its_sender_is_no_unicode(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    buffer.open([ticket(0, num_members=1)])
    lease = leased(buffer)
    blob = key(run_id, "train", "blob", 0, 0, 0, lease.fence)
    redis_client.set(blob, b"poison", ex=60)
    record = b"0:%d:0:7:5:1:100:\xff" % lease.fence
    assert buffer._scripts["insert"](keys=[buffer._base, blob], args=[0, 0, record]) == b"stored"
    assert [group.members[0].actor for group in list_groups(redis_client, run_id)] == ["\ufffd"]
    assert buffer.claim(1, 1, policy_version=0, max_lag=0) == []
    assert buffer.quarantined()[0].actor == "\ufffd"


def test_the_quarantine_is_bounded(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    num_poisoned = MAX_QUARANTINED + 3
    make_ready(buffer, run_id, *range(num_poisoned))
    for blob in stored_keys(redis_client, run_id, "blob"):
        redis_client.set(blob, b"poison")
    assert buffer.claim(1, num_poisoned, policy_version=0, max_lag=0) == []
    assert [set_aside.group_id for set_aside in buffer.quarantined()] == list(range(num_poisoned))[:2:-1]
    assert (buffer.ledger().quarantined, buffer.ledger().dropped) == (MAX_QUARANTINED, {"poison": 3})
    assert len(stored_keys(redis_client, run_id, "blob")) == 2 * MAX_QUARANTINED
    assert buffer.audit() == []


def test_a_person_sets_groups_aside_in_any_state_and_their_leases_are_lost(buffer: Buffer, run_id: str) -> None:
    make_ready(buffer, run_id, 0)
    buffer.open([ticket(1), ticket(2)])
    lease = leased(buffer)
    buffer.hand_in(lease, partial_of(lease, 0, run_id=run_id))
    someone = make_buffer(buffer._client, run_id)  # holds no epoch, and needs none
    assert [someone.quarantine(group_id, "looks odd") for group_id in (2, 1, 0, 77)] == [True, True, True, False]
    assert someone.quarantine(2, "looks odd again")
    assert buffer.insert(lease, attempt_at(lease, 0, run_id=run_id)) is InsertResult.FENCED
    assert buffer.heartbeat("a", [lease]) == set()
    assert [(odd.group_id, odd.member, odd.actor, odd.reason) for odd in someone.quarantined()] == [
        (group_id, None, None, "looks odd") for group_id in (0, 1, 2)
    ]
    ledger = buffer.ledger()
    assert (ledger.quarantined, ledger.held_trajectories, ledger.partials_held) == (3, 2, 1)
    assert buffer.audit() == []


def test_a_requeued_group_begins_anew_and_its_holder_is_fenced(
    buffer: Buffer, redis_client: redis.Redis, run_id: str
) -> None:
    make_ready(buffer, run_id, 0, 1)
    buffer.quarantine(1, "looks odd")
    buffer.open([ticket(2), ticket(3), ticket(4, num_members=1)])
    lease = leased(buffer)
    assert buffer.fail(lease, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="closed") == 1
    assert buffer.insert(lease, attempt_at(lease, 1, run_id=run_id)) is InsertResult.STORED
    assert buffer.hand_in(lease, msgspec.structs.replace(partial_of(lease, 0, run_id=run_id), attempt=1))
    assert buffer.requeue([0, 1, 2, 3, 77]) == 3  # 3 is queued as it is
    assert stored_keys(redis_client, run_id, "blob") + stored_keys(redis_client, run_id, "partial") == []
    assert buffer.insert(lease, attempt_at(lease, 0, run_id=run_id)) is InsertResult.FENCED
    ledger = buffer.ledger()
    assert (ledger.queued, ledger.dropped, ledger.dropped_trajectories) == (5, {}, {"requeued": 5})
    assert (ledger.partials_discarded, ledger.held_trajectories) == ({"requeued": 1}, 0)
    assert buffer.audit() == []
    again = [leased(buffer) for _ in range(3)]
    assert [(lease.ticket.group_id, lease.missing) for lease in again] == [(i, {0: 0, 1: 0}) for i in range(3)]
    for lease in again:
        fill(buffer, lease, run_id)
    assert ids(buffer.claim(1, 3, policy_version=0, max_lag=0)) == [0, 1, 2]
    assert buffer.requeue([0]) == 0  # it may be in the model already
    assert buffer.audit() == []


def test_a_lost_payload_drops_its_group_with_the_reason(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    make_ready(buffer, run_id, 0, 1)
    redis_client.delete(stored_keys(redis_client, run_id, "blob:0:1")[0])
    assert ids(buffer.claim(1, 2, policy_version=0, max_lag=0)) == [1]
    assert buffer.ledger().dropped == {"lost_payload": 1}
    assert buffer.audit() == []


def test_an_insert_is_judged_before_it_is_sent(redis_client: redis.Redis, run_id: str) -> None:
    buffer = make_buffer(redis_client, run_id, max_bytes=700)
    buffer.acquire_epoch()
    buffer.open([ticket(0)])
    lease = leased(buffer)
    with pytest.raises(InvalidTrajectory, match=r"bytes, `replay.max_trajectory_bytes` is 700"):
        buffer.insert(lease, attempt_at(lease, 0, run_id=run_id, num_sampled=100))
    with pytest.raises(InvalidTrajectory, match="the ticket says"):
        buffer.insert(lease, attempt_at(lease, 0, run_id="another run"))
    with pytest.raises(InvalidTrajectory, match="member 5 of a group of 2"):
        buffer.insert(lease, msgspec.structs.replace(attempt_at(lease, 0, run_id=run_id), member=5))
    cut = msgspec.structs.replace(
        attempt_at(lease, 0, run_id=run_id), stop_reason=StopReason.ENV_ERROR, outcome=Outcome.ENV_FAILURE
    )
    with pytest.raises(InvalidTrajectory, match=r"outcome env_failure is not policy: .* report the rest with fail\(\)"):
        buffer.insert(lease, cut)
    hotter = msgspec.structs.replace(lease.ticket.sampling, temperature=2.0)
    with pytest.raises(InvalidTrajectory, match=r"temperature=2.0.*the ticket says.*temperature=1.0"):
        buffer.insert(lease, msgspec.structs.replace(attempt_at(lease, 0, run_id=run_id), sampling=hotter))
    for beyond_msgpack in ({"purchase": np.float64(0.0)}, {"half \ud83d": 0.0}):
        whole = attempt_at(lease, 0, run_id=run_id)
        (turn,) = whole.turns
        odd = msgspec.structs.replace(whole, turns=[msgspec.structs.replace(turn, rewards=beyond_msgpack)])
        with pytest.raises(InvalidTrajectory, match="cannot be written: "):
            buffer.insert(lease, odd)
    assert buffer.ledger().inserted == 0
    assert stored_keys(redis_client, run_id, "blob") == []


def test_scripts_survive_a_server_that_forgot_them(buffer: Buffer, redis_client: redis.Redis, run_id: str) -> None:
    buffer.open([ticket(0)])
    lease = leased(buffer)
    redis_client.script_flush()
    assert buffer.insert(lease, attempt_at(lease, 0, run_id=run_id)) is InsertResult.STORED
    redis_client.script_flush()
    assert buffer.insert(lease, attempt_at(lease, 1, run_id=run_id)) is InsertResult.STORED
    redis_client.script_flush()
    assert ids(buffer.claim(1, 1, policy_version=0, max_lag=0)) == [0]


def test_a_full_server_makes_inserts_wait_and_still_drains(tmp_path: Path, run_id: str) -> None:
    with start_server(tmp_path) as server, connect(server.secret_url) as client:
        buffer = make_buffer(client, run_id)
        buffer.acquire_epoch()
        buffer.open([ticket(0), ticket(1), ticket(2)])
        big = 60_000
        first, second = leased(buffer), leased(buffer)
        for member in (0, 1):
            trajectory = attempt_at(first, member, run_id=run_id, num_sampled=big)
            assert buffer.insert(first, trajectory) is InsertResult.STORED
        client.config_set("maxmemory", 1 << 20)  # the two that are stored take more
        waiting = attempt_at(second, 0, run_id=run_id, num_sampled=big)
        assert buffer.insert(second, waiting) is InsertResult.FULL
        assert buffer.insert(first, trajectory) is InsertResult.DUPLICATE
        assert buffer.ledger().inserted == 2 and buffer.audit() == []
        assert buffer.heartbeat("a", [second]) == {1}
        third = leased(buffer)
        buffer.fail(third, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="none of the memory's business")
        buffer.release(third)
        assert buffer.open([ticket(3)]) == 1
        assert ids(buffer.claim(1, 1, policy_version=0, max_lag=0)) == [0]
        assert buffer.settle(1) == 1
        client.config_set("maxmemory", 4 << 20)
        assert buffer.insert(second, waiting) is InsertResult.STORED
        assert buffer.audit() == []


def test_no_acknowledged_insert_is_lost_when_the_server_is_killed(tmp_path: Path, run_id: str) -> None:
    num_groups = 400
    stored: list[tuple[int, int]] = []
    inserting = threading.Event()
    with start_server(tmp_path) as server, connect(server.secret_url) as client:
        buffer = make_buffer(client, run_id)
        buffer.acquire_epoch()
        buffer.open([ticket(group_id) for group_id in range(num_groups)])
        leases = [leased(buffer) for _ in range(num_groups)]

        def insert_all() -> None:
            for lease in leases:
                for member in (0, 1):
                    trajectory = attempt_at(lease, member, run_id=run_id)
                    result = buffer.insert(lease, trajectory)
                    assert result in (InsertResult.STORED, InsertResult.DUPLICATE)
                    stored.append((lease.ticket.group_id, member))
                    if len(stored) == 100:
                        inserting.set()

        writer = threading.Thread(target=insert_all)
        writer.start()
        assert inserting.wait(30)
        server.process.kill()
        server.process.wait()
        killed_at = len(stored)
        assert 100 <= killed_at < 2 * num_groups
        with start_server(tmp_path) as again:
            assert again.url == server.url
            writer.join(60)
            assert not writer.is_alive() and len(stored) == 2 * num_groups
            assert buffer.audit() == []
            assert len(buffer.claim(1, num_groups, policy_version=0, max_lag=0)) == num_groups
            assert buffer.ledger().inserted == 2 * num_groups
