"""The verbs of people: quarantine and requeue."""

import msgspec
import redis

from slipstream.common.records.trajectory import Outcome
from slipstream.replay.records.ticket import InsertResult
from tests.replay.records.attempts import (
    Views,
    attempt_at,
    fill,
    ids,
    leased,
    make_buffer,
    make_ready,
    partial_of,
    stored_keys,
    ticket,
)


def test_a_person_sets_groups_aside_in_any_state_and_their_leases_are_lost(buffer: Views, run_id: str) -> None:
    make_ready(buffer, run_id, 0)
    buffer.learner.open([ticket(1), ticket(2)])
    lease = leased(buffer)
    buffer.actor.hand_in(lease, partial_of(lease, 0, run_id=run_id))
    someone = make_buffer(buffer.client, run_id)  # holds no epoch, and needs none
    assert [someone.people.quarantine(group_id, "looks odd") for group_id in (2, 1, 0, 77)] == [True, True, True, False]
    assert someone.people.quarantine(2, "looks odd again")
    assert buffer.actor.insert(lease, attempt_at(lease, 0, run_id=run_id)) is InsertResult.FENCED
    assert buffer.actor.heartbeat("a", [lease]) == set()
    assert [(odd.group_id, odd.member, odd.actor, odd.reason) for odd in someone.quarantined()] == [
        (group_id, None, None, "looks odd") for group_id in (0, 1, 2)
    ]
    ledger = buffer.learner.ledger()
    assert (ledger.quarantined, ledger.held_trajectories, ledger.partials_held) == (3, 2, 1)
    assert buffer.audit() == []


def test_a_requeued_group_begins_anew_and_its_holder_is_fenced(
    buffer: Views, redis_client: redis.Redis, run_id: str
) -> None:
    make_ready(buffer, run_id, 0, 1)
    buffer.people.quarantine(1, "looks odd")
    buffer.learner.open([ticket(2), ticket(3), ticket(4, num_members=1)])
    lease = leased(buffer)
    assert buffer.actor.fail(lease, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="closed") == 1
    assert buffer.actor.insert(lease, attempt_at(lease, 1, run_id=run_id)) is InsertResult.STORED
    assert buffer.actor.hand_in(lease, msgspec.structs.replace(partial_of(lease, 0, run_id=run_id), attempt=1))
    assert buffer.people.requeue([0, 1, 2, 3, 77]) == 3  # 3 is queued as it is
    assert stored_keys(redis_client, run_id, "blob") + stored_keys(redis_client, run_id, "partial") == []
    assert buffer.actor.insert(lease, attempt_at(lease, 0, run_id=run_id)) is InsertResult.FENCED
    ledger = buffer.learner.ledger()
    assert (ledger.queued, ledger.dropped, ledger.dropped_trajectories) == (5, {}, {"requeued": 5})
    assert (ledger.partials_discarded, ledger.held_trajectories) == ({"requeued": 1}, 0)
    assert buffer.audit() == []
    again = [leased(buffer) for _ in range(3)]
    assert [(lease.ticket.group_id, lease.missing) for lease in again] == [(i, {0: 0, 1: 0}) for i in range(3)]
    for lease in again:
        fill(buffer, lease, run_id)
    assert ids(buffer.learner.claim(1, 3, policy_version=0, max_lag=0)) == [0, 1, 2]
    assert buffer.people.requeue([0]) == 0  # it may be in the model already
    assert buffer.audit() == []
