"""The verbs of an actor: lease, heartbeat, insert, hand_in, fail and release."""

import msgspec
import numpy as np
import pytest
import redis

from slipstream.common.records.trajectory import InvalidTrajectory, Outcome, StopReason
from slipstream.replay.records.ticket import InsertResult
from tests.replay.records.attempts import SAMPLING, Views, leased, ticket, turn


def test_a_heartbeat_keeps_the_leases_that_are_held_and_names_them(buffer: Views) -> None:
    first, second = buffer.begin(ticket(0), ticket(1)), leased(buffer)
    buffer.actor.release(second)
    leases = f"{buffer.base}:leased"
    deadline_ms = buffer.client.zscore(leases, "0")
    earlier_ms = deadline_ms - 500_000
    buffer.client.zadd(leases, {"0": earlier_ms})
    assert buffer.actor.heartbeat("b", [first]) == set() and buffer.client.zscore(leases, "0") == earlier_ms
    assert buffer.actor.heartbeat("a", [first, second]) == {0} and buffer.client.zscore(leases, "0") >= deadline_ms


def test_a_lease_that_the_server_lost_with_its_newest_writes_is_fenced(buffer: Views) -> None:
    buffer.learner.open([ticket(0)])
    saved = {name: buffer.client.dump(name) for name in buffer.client.scan_iter(f"{buffer.base}:*")}
    zombie = leased(buffer, "zombie")
    for name, state in saved.items():
        buffer.client.restore(name, 0, state, replace=True)
    buffer.client.delete(f"{buffer.base}:leased")
    heir = leased(buffer, "heir")
    assert heir.fence > zombie.fence
    assert buffer.actor.insert(zombie, buffer.attempt(zombie, 0)) is InsertResult.FENCED
    buffer.insert(heir, 0)
    assert buffer.audit() == []


def test_a_second_try_cannot_change_what_is_stored(buffer: Views) -> None:
    lease = buffer.begin(ticket(0, num_members=1))
    first = buffer.attempt(lease, 0, num_sampled=2)
    assert buffer.actor.insert(lease, first) is InsertResult.STORED
    assert buffer.actor.insert(lease, buffer.attempt(lease, 0, num_sampled=3)) is InsertResult.DUPLICATE
    (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    assert group.trajectories == [first]


@pytest.mark.parametrize("verb", ["insert", "hand_in"])
@pytest.mark.parametrize("record", ["", "0:{fence}", "0:{fence}:0:7:5:1:x:a", "-1:{fence}:0:7:5:1:100:a", "::::::::"])
def test_what_is_no_record_is_refused_and_changes_nothing(buffer: Views, verb: str, record: str) -> None:
    lease = buffer.begin(ticket(0, num_members=1))
    blob = f"{buffer.base}:blob:0:0:0:{lease.fence}"
    buffer.client.set(blob, b"payload", ex=60)
    with pytest.raises(redis.ResponseError, match="malformed record"):
        buffer.actor._verbs._scripts[verb](keys=[buffer.base, blob], args=[0, 0, record.format(fence=lease.fence)])
    assert (buffer.ledger.inserted, buffer.ledger.leased) == (0, 1)
    assert buffer.audit() == []


def test_failed_attempts_are_redone_until_they_run_out_and_say_why(buffer: Views) -> None:
    lease = buffer.begin(ticket(0), ticket(1))
    buffer.insert(lease, 1)
    for attempt, reason in enumerate(("closed", "too slow", "no item \ud83d")):
        missing = lease.missing[0]
        failed = buffer.actor.fail(lease, 0, attempt=attempt, outcome=Outcome.ENV_FAILURE, reason=reason)
        assert (missing, failed) == (attempt, None if attempt == 2 else attempt + 1)
        buffer.actor.release(lease)
        lease = leased(buffer, "another actor")
    assert lease.ticket.group_id == 1 and buffer.people.quarantine(1, "looks \ud83d")
    assert [failure.reason for failure in buffer.learner.failures()] == ["no item ?", "too slow", "closed"]
    assert buffer.quarantined()[0].reason == "looks ?"
    ledger = buffer.ledger
    assert (ledger.dropped, ledger.dropped_trajectories) == ({"env_failure": 1}, {"env_failure": 1})
    assert (ledger.redone_members, buffer.audit()) == (2, [])


def test_a_newer_partial_takes_the_place_of_an_older(buffer: Views) -> None:
    buffer.learner.open([ticket(0)])
    for num_sampled in (2, 5):
        lease = leased(buffer)
        partial = buffer.partial(lease, 0, num_sampled=num_sampled)
        buffer.actor.hand_in(lease, partial)
        buffer.actor.release(lease)
    assert leased(buffer).partials == {0: partial}
    assert buffer.ledger.partials_discarded == {"superseded": 1}
    assert len(buffer.names("partial")) == 1
    assert buffer.audit() == []


def test_a_partial_that_is_lost_or_poisoned_is_discarded_and_its_member_begins_anew(buffer: Views) -> None:
    lease = buffer.begin(ticket(0))
    for member in (0, 1):
        buffer.actor.hand_in(lease, buffer.partial(lease, member))
    buffer.actor.release(lease)
    buffer.client.delete(*buffer.names("partial:0:0"))
    buffer.client.set(buffer.names("partial:0:1")[0], b"\x00garbage")
    lease = leased(buffer)
    assert (lease.missing, lease.partials) == ({0: 0, 1: 0}, {})
    assert buffer.ledger.partials_discarded == {"lost_payload": 1, "poison": 1}
    assert buffer.audit() == []


def test_only_what_was_preempted_is_handed_in(buffer: Views) -> None:
    lease = buffer.begin(ticket(0))
    with pytest.raises(InvalidTrajectory, match=r"outcome is policy, expected preempted: .*hand_in\(\) preempted"):
        buffer.actor.hand_in(lease, buffer.attempt(lease, 0))
    with pytest.raises(InvalidTrajectory, match="no turns: nothing was sampled"):
        buffer.actor.hand_in(lease, msgspec.structs.replace(buffer.partial(lease, 0), turns=[]))
    with pytest.raises(InvalidTrajectory, match="outcome is preempted, expected policy"):
        buffer.actor.insert(lease, buffer.partial(lease, 0))


FAILED = {"stop_reason": StopReason.ENV_ERROR, "outcome": Outcome.ENV_FAILURE}
WARMER = {"sampling": msgspec.structs.replace(SAMPLING, temperature=2.0)}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"run_id": "another run"}, "the ticket's is"),
        ({"member": 5}, "member is 5, expected 0 to 1"),
        (FAILED, r"outcome is env_failure, expected policy: .* report the others with fail\(\)"),
        (WARMER, r"temperature=2.0.*the ticket's is.*temperature=1.0"),
        ({"turns": [turn(2, 4, rewards={"purchase": np.float64(0.0)})]}, "cannot be encoded: "),
        ({"turns": [turn(2, 4, rewards={"half \ud83d": 0.0})]}, "cannot be encoded: "),
    ],
)
def test_an_insert_is_judged_before_it_is_sent(buffer: Views, changes: dict[str, object], complaint: str) -> None:
    lease = buffer.begin(ticket(0))
    with pytest.raises(InvalidTrajectory, match=complaint):
        buffer.actor.insert(lease, msgspec.structs.replace(buffer.attempt(lease, 0), **changes))
    assert (buffer.ledger.inserted, buffer.names("blob")) == (0, [])
