"""The verbs of an actor: lease, heartbeat, insert, hand_in, fail and release."""

import msgspec
import numpy as np
import pytest
import redis

from slipstream.common.records.trajectory import InvalidTrajectory, Outcome, StopReason
from slipstream.replay.buffer.actor_buffer import ORPHAN_TTL_S
from slipstream.replay.records.keys import key
from slipstream.replay.records.ticket import InsertResult
from tests.common.process.test_patience import wait_until
from tests.replay.records.attempts import Views, attempt_at, fill, leased, make_buffer, partial_of, stored_keys, ticket


def test_an_expired_lease_returns_only_the_missing_members(redis_client: redis.Redis, run_id: str) -> None:
    buffer = make_buffer(redis_client, run_id, lease_ttl_s=0.05)
    buffer.learner.acquire_epoch()
    buffer.learner.open([ticket(0, num_members=3)])
    dead = leased(buffer, "dead")
    assert buffer.actor.insert(dead, attempt_at(dead, 1, run_id=run_id)) is InsertResult.STORED
    wait_until(lambda: buffer.actor.heartbeat("someone", []) == set() and buffer.learner.ledger().queued == 1)
    lease = leased(make_buffer(redis_client, run_id), "heir")
    assert lease.missing == {0: 1, 2: 1}
    ledger = buffer.learner.ledger()
    assert (ledger.expired_leases, ledger.redone_members, ledger.held_trajectories) == (1, 2, 1)
    assert buffer.actor.insert(dead, attempt_at(dead, 0, run_id=run_id)) is InsertResult.FENCED
    fill(buffer, lease, run_id)
    (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    assert [(t.member, t.attempt) for t in group.trajectories] == [(0, 1), (1, 0), (2, 1)]
    assert buffer.audit() == []


def test_a_heartbeat_keeps_the_leases_that_are_held_and_names_them(
    buffer: Views, redis_client: redis.Redis, run_id: str
) -> None:
    buffer.learner.open([ticket(0), ticket(1)])
    first, second = leased(buffer), leased(buffer)
    buffer.actor.release(second)
    deadlines = key(run_id, "train", "leased")
    deadline_ms = redis_client.zscore(deadlines, "0")
    redis_client.zadd(deadlines, {"0": deadline_ms - 500_000})
    assert buffer.actor.heartbeat("b", [first]) == set()
    assert redis_client.zscore(deadlines, "0") == deadline_ms - 500_000
    assert buffer.actor.heartbeat("a", [first, second]) == {0}
    assert redis_client.zscore(deadlines, "0") >= deadline_ms


def test_a_zombie_is_fenced_and_its_payload_removed(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    buffer.learner.open([ticket(0)])
    zombie = leased(buffer, "zombie")
    buffer.actor.release(zombie)
    heir = leased(buffer, "heir")
    assert buffer.actor.insert(zombie, attempt_at(zombie, 0, run_id=run_id)) is InsertResult.FENCED
    assert stored_keys(redis_client, run_id, "blob") == []
    assert buffer.actor.insert(heir, attempt_at(heir, 0, run_id=run_id)) is InsertResult.STORED
    assert buffer.actor.insert(zombie, attempt_at(zombie, 0, run_id=run_id)) is InsertResult.FENCED
    assert buffer.learner.ledger().fenced_inserts == 2
    assert len(stored_keys(redis_client, run_id, "blob")) == 1
    assert buffer.audit() == []


def test_a_lease_that_the_server_lost_with_its_newest_writes_is_fenced(
    buffer: Views, redis_client: redis.Redis, run_id: str
) -> None:
    buffer.learner.open([ticket(0)])
    saved = {name: redis_client.dump(name) for name in redis_client.scan_iter(key(run_id, "train", "*"))}
    zombie = leased(buffer, "zombie")
    for name, state in saved.items():
        redis_client.restore(name, 0, state, replace=True)
    redis_client.delete(key(run_id, "train", "leased"))
    heir = leased(buffer, "heir")
    assert heir.fence > zombie.fence
    assert buffer.actor.insert(zombie, attempt_at(zombie, 0, run_id=run_id)) is InsertResult.FENCED
    assert buffer.actor.insert(heir, attempt_at(heir, 0, run_id=run_id)) is InsertResult.STORED
    assert buffer.audit() == []


def test_a_second_try_cannot_change_what_is_stored(buffer: Views, run_id: str) -> None:
    buffer.learner.open([ticket(0, num_members=1)])
    lease = leased(buffer)
    first = attempt_at(lease, 0, run_id=run_id, num_sampled=2)
    assert buffer.actor.insert(lease, first) is InsertResult.STORED
    assert buffer.actor.insert(lease, attempt_at(lease, 0, run_id=run_id, num_sampled=3)) is InsertResult.DUPLICATE
    (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    assert group.trajectories == [first]


def test_a_payload_without_a_commit_expires_and_is_never_seen(
    buffer: Views, redis_client: redis.Redis, run_id: str
) -> None:
    buffer.learner.open([ticket(0)])
    lease = leased(buffer)
    orphan = key(run_id, "train", "blob", 0, 0, 0, lease.fence)
    redis_client.set(orphan, b"half an insert", ex=ORPHAN_TTL_S, nx=True)
    assert 0 < redis_client.ttl(orphan) <= ORPHAN_TTL_S
    assert buffer.learner.ledger().inserted == 0
    assert buffer.audit() == []


@pytest.mark.parametrize("verb", ["insert", "hand_in"])
@pytest.mark.parametrize("record", ["", "0:{fence}", "0:{fence}:0:7:5:1:x:a", "-1:{fence}:0:7:5:1:100:a", "::::::::"])
def test_what_is_no_record_is_refused_and_changes_nothing(
    buffer: Views, redis_client: redis.Redis, run_id: str, verb: str, record: str
) -> None:
    buffer.learner.open([ticket(0, num_members=1)])
    lease = leased(buffer)
    blob = key(run_id, "train", "blob", 0, 0, 0, lease.fence)
    redis_client.set(blob, b"payload", ex=60)
    with pytest.raises(redis.ResponseError, match="malformed record"):
        buffer.actor._verbs._scripts[verb](keys=[buffer.base, blob], args=[0, 0, record.format(fence=lease.fence)])
    assert (buffer.learner.ledger().inserted, buffer.learner.ledger().leased) == (0, 1)
    assert buffer.audit() == []


def test_failed_attempts_are_redone_until_they_run_out(buffer: Views, run_id: str) -> None:
    buffer.learner.open([ticket(0)])
    lease = leased(buffer)
    assert buffer.actor.insert(lease, attempt_at(lease, 1, run_id=run_id)) is InsertResult.STORED
    assert buffer.actor.fail(lease, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="the shop is closed") == 1
    buffer.actor.release(lease)
    lease = leased(buffer, "another actor")
    assert lease.missing == {0: 1}
    assert buffer.actor.fail(lease, 0, attempt=1, outcome=Outcome.TRUNCATED, reason="too slow") == 2
    assert buffer.actor.fail(lease, 0, attempt=2, outcome=Outcome.ENV_FAILURE, reason="closed again") is None
    assert buffer.actor.heartbeat("another actor", [lease]) == set()
    ledger = buffer.learner.ledger()
    assert (ledger.dropped, ledger.dropped_trajectories) == ({"env_failure": 1}, {"env_failure": 1})
    assert ledger.redone_members == 2
    assert [failure.reason for failure in buffer.learner.failures()] == [
        "closed again",
        "too slow",
        "the shop is closed",
    ]
    assert buffer.audit() == []


def test_a_reason_that_is_no_unicode_is_kept_as_far_as_it_is(buffer: Views) -> None:
    buffer.learner.open([ticket(0)])
    lease = leased(buffer)
    assert buffer.actor.fail(lease, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="no item \ud83d") == 1
    assert buffer.people.quarantine(0, "looks \ud83d")
    assert buffer.learner.failures()[0].reason == "no item ?"
    assert buffer.quarantined()[0].reason == "looks ?"


def test_the_next_lease_goes_on_from_what_a_preempted_actor_handed_in(
    buffer: Views, redis_client: redis.Redis, run_id: str
) -> None:
    buffer.learner.open([ticket(0)])
    leaving = leased(buffer, "leaving")
    partial = partial_of(leaving, 1, run_id=run_id)
    assert buffer.actor.hand_in(leaving, partial) is InsertResult.STORED
    assert buffer.actor.hand_in(leaving, partial) is InsertResult.DUPLICATE
    assert buffer.learner.ledger().inserted == 0
    buffer.actor.release(leaving)
    heir = leased(buffer, "heir")
    assert (heir.missing, heir.partials) == ({0: 0, 1: 0}, {1: partial})
    assert buffer.actor.hand_in(leaving, partial_of(leaving, 0, run_id=run_id)) is InsertResult.FENCED
    fill(buffer, heir, run_id)
    ledger = buffer.learner.ledger()
    assert (ledger.partials_handed_in, ledger.partials_resumed, ledger.partials_held) == (1, 1, 0)
    assert (ledger.partials_discarded, ledger.ready) == ({}, 1)
    assert stored_keys(redis_client, run_id, "partial") == []
    assert buffer.audit() == []


def test_a_newer_partial_takes_the_place_of_an_older(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    buffer.learner.open([ticket(0)])
    for num_sampled in (2, 5):
        lease = leased(buffer)
        buffer.actor.hand_in(lease, partial_of(lease, 0, run_id=run_id, num_sampled=num_sampled))
        buffer.actor.release(lease)
    (partial,) = leased(buffer).partials.values()
    assert partial.num_tokens == 7
    assert buffer.learner.ledger().partials_discarded == {"superseded": 1}
    assert len(stored_keys(redis_client, run_id, "partial")) == 1
    assert buffer.audit() == []


def test_a_partial_that_is_lost_or_poisoned_is_discarded_and_its_member_begins_anew(
    buffer: Views, redis_client: redis.Redis, run_id: str
) -> None:
    buffer.learner.open([ticket(0)])
    lease = leased(buffer)
    for member in (0, 1):
        buffer.actor.hand_in(lease, partial_of(lease, member, run_id=run_id))
    buffer.actor.release(lease)
    redis_client.delete(*stored_keys(redis_client, run_id, "partial:0:0"))
    redis_client.set(stored_keys(redis_client, run_id, "partial:0:1")[0], b"\x00garbage")
    lease = leased(buffer)
    assert (lease.missing, lease.partials) == ({0: 0, 1: 0}, {})
    assert buffer.learner.ledger().partials_discarded == {"lost_payload": 1, "poison": 1}
    assert buffer.audit() == []


def test_only_what_was_preempted_is_handed_in(buffer: Views, run_id: str) -> None:
    buffer.learner.open([ticket(0)])
    lease = leased(buffer)
    with pytest.raises(InvalidTrajectory, match=r"outcome is policy, expected preempted: .*hand_in\(\) preempted"):
        buffer.actor.hand_in(lease, attempt_at(lease, 0, run_id=run_id))
    with pytest.raises(InvalidTrajectory, match="no turns: nothing was sampled"):
        buffer.actor.hand_in(lease, msgspec.structs.replace(partial_of(lease, 0, run_id=run_id), turns=[]))
    with pytest.raises(InvalidTrajectory, match="outcome is preempted, expected policy"):
        buffer.actor.insert(lease, partial_of(lease, 0, run_id=run_id))


def test_an_insert_is_judged_before_it_is_sent(
    redis_client: redis.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.replay.buffer.payloads.MAX_TRAJECTORY_BYTES", 700)
    buffer = make_buffer(redis_client, run_id)
    buffer.learner.acquire_epoch()
    buffer.learner.open([ticket(0)])
    lease = leased(buffer)
    with pytest.raises(InvalidTrajectory, match=r"bytes, the limit is 700"):
        buffer.actor.insert(lease, attempt_at(lease, 0, run_id=run_id, num_sampled=100))
    with pytest.raises(InvalidTrajectory, match="the ticket's is"):
        buffer.actor.insert(lease, attempt_at(lease, 0, run_id="another run"))
    with pytest.raises(InvalidTrajectory, match="member is 5, expected 0 to 1"):
        buffer.actor.insert(lease, msgspec.structs.replace(attempt_at(lease, 0, run_id=run_id), member=5))
    cut = msgspec.structs.replace(
        attempt_at(lease, 0, run_id=run_id), stop_reason=StopReason.ENV_ERROR, outcome=Outcome.ENV_FAILURE
    )
    with pytest.raises(
        InvalidTrajectory, match=r"outcome is env_failure, expected policy: .* report the others with fail\(\)"
    ):
        buffer.actor.insert(lease, cut)
    hotter = msgspec.structs.replace(lease.ticket.sampling, temperature=2.0)
    with pytest.raises(InvalidTrajectory, match=r"temperature=2.0.*the ticket's is.*temperature=1.0"):
        buffer.actor.insert(lease, msgspec.structs.replace(attempt_at(lease, 0, run_id=run_id), sampling=hotter))
    for beyond_msgpack in ({"purchase": np.float64(0.0)}, {"half \ud83d": 0.0}):
        whole = attempt_at(lease, 0, run_id=run_id)
        (turn,) = whole.turns
        odd = msgspec.structs.replace(whole, turns=[msgspec.structs.replace(turn, rewards=beyond_msgpack)])
        with pytest.raises(InvalidTrajectory, match="cannot be encoded: "):
            buffer.actor.insert(lease, odd)
    assert buffer.learner.ledger().inserted == 0
    assert stored_keys(redis_client, run_id, "blob") == []
