"""The verbs of the learner: open, claim, drop, settle and reopen."""

import time
from typing import Any
from unittest.mock import Mock

import pytest
import redis

from slipstream.common.records.trajectory import VersionSpan
from slipstream.replay.buffer.bulk import Bulk
from slipstream.replay.buffer.listing import list_groups
from slipstream.replay.records.keys import FencedOut, epoch_key, key
from tests.replay.records.attempts import Views, ids, leased, make_buffer, ticket


def test_tickets_out_of_order_are_refused_rather_than_forgotten(buffer: Views) -> None:
    with pytest.raises(ValueError, match=r"rising order of group_id, got \[2, 1\]"):
        buffer.learner.open([ticket(2), ticket(1)])


def test_a_claim_that_raised_is_the_same_when_tried_again(buffer: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer.play(0, 1)
    cut = redis.ConnectionError("the connection broke before the payloads came")
    with monkeypatch.context() as patched:
        patched.setattr(Bulk, "read", Mock(side_effect=cut))
        with pytest.raises(redis.ConnectionError):
            buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    assert buffer.ledger.claimed == 1
    assert buffer.claim() == [0]
    assert buffer.claim() == [1]


def saved(client: redis.Redis, run_id: str) -> dict[bytes, bytes | None]:
    """What the server would have after a crash, if it saved last now."""
    return {name: client.dump(name) for name in client.scan_iter(f"{key(run_id)}:*")}


def go_back_to(client: redis.Redis, run_id: str, state: dict[bytes, bytes | None]) -> None:
    client.delete(*client.scan_iter(f"{key(run_id)}:*"))
    for name, value in state.items():
        client.restore(name, 0, value)


@pytest.mark.parametrize("max_uses", [1, 2])
def test_a_group_whose_claims_the_server_lost_is_trained_once(
    buffer: Views, max_uses: int, caplog: pytest.LogCaptureFixture
) -> None:
    def claimed(step: int) -> list[int]:
        return buffer.claim(step, 1, max_uses=max_uses)

    buffer.play(0, 1)
    before = saved(buffer.client, buffer.run_id)
    assert [claimed(step) for step in range(max_uses)] == [[0]] * max_uses
    go_back_to(buffer.client, buffer.run_id, before)
    last = 2 * max_uses - 1
    assert [claimed(step) for step in range(max_uses, last + 1)] == [[]] * max_uses, "they were returned before"
    assert "group 0 under " in caplog.text and "the server lost that claim" in caplog.text
    assert claimed(last) == [1]
    buffer.learner.drop([1], "surplus")
    buffer.learner.settle(last)
    ledger = buffer.ledger
    assert (ledger.trained, ledger.ready, ledger.balanced) == (1, 0, True)


def test_a_trained_member_comes_no_second_time_beside_one_that_was_played_again(buffer: Views) -> None:
    lease = buffer.begin(ticket(0))
    buffer.insert(lease, 0)
    before = saved(buffer.client, buffer.run_id)
    for number in range(3):
        buffer.insert(lease, 1, started_at_s=1.8e9 + number)
        assert buffer.claim(1 + number, 1) == ([] if number else [0])
        go_back_to(buffer.client, buffer.run_id, before)


def test_a_group_is_played_again_where_the_server_lost_it_first(buffer: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer.learner.open([ticket(0)])
    before, read = saved(buffer.client, buffer.run_id), Bulk.read
    buffer.insert(leased(buffer))

    def go_back_and_read(*arguments: Any) -> Any:
        go_back_to(buffer.client, buffer.run_id, before)
        return read(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Bulk, "read", go_back_and_read)
        assert buffer.claim() == []
    assert (buffer.ledger.queued, buffer.ledger.dropped) == (1, {})
    buffer.insert(leased(buffer))
    assert buffer.claim() == [0]


def test_a_claimed_group_that_a_person_requeued_is_returned_once_it_was_played_again(buffer: Views) -> None:
    buffer.play(0)
    assert buffer.claim() == [0]
    buffer.learner._quarantine(0, None, None, "looked odd")  # a person could not: a model may have learned from it
    assert buffer.people.requeue([0]) == 1
    buffer.insert(leased(buffer), started_at_s=1.8e9)
    assert buffer.claim(2, 1) == [0]


def test_a_copy_of_a_claim_that_arrives_late_takes_nothing(buffer: Views) -> None:
    buffer.play(0, 1, 2)
    assert (buffer.claim(1, 1), buffer.claim(2, 9)) == ([0], [])
    verbs, rest = buffer.learner._verbs, (0, 1, 0)  # oldest version, each group once, none set apart
    assert verbs.call("claim", verbs.epoch, 0, 1, 1, *rest) == []  # held up on its way since step 1
    assert verbs.call("claim", verbs.epoch, 1, 2, 1, *rest) == []  # the one that found too few: it was answered so
    assert buffer.claim(2, 2) == [1, 2]


def test_a_sweep_of_many_old_groups_is_not_made_in_one_go(buffer: Views) -> None:
    buffer.learner.open([ticket(group_id, num_members=1) for group_id in range(250)])
    for _ in range(250):
        buffer.insert(leased(buffer))
    assert buffer.learner.claim(1, 1, policy_version=1, max_lag=0) == []
    assert buffer.ledger.dropped == {"too_old": 250}
    assert buffer.audit() == []


def test_the_newest_token_of_a_trajectory_stands_for_it(buffer: Views) -> None:
    """A long episode: its first token is of version 0, its last of version 9."""
    spans = [VersionSpan(start=2, stop=3, policy_version=0), VersionSpan(start=3, stop=4, policy_version=9)]
    buffer.insert(buffer.begin(ticket(0, num_members=1)), version_spans=spans)
    assert ids(buffer.learner.claim(1, 1, policy_version=10, max_lag=1)) == [0]


def test_a_server_that_comes_back_empty_fences_the_learner_from_before_out(buffer: Views) -> None:
    """It was the third; its successor is the first that the server knows."""
    for _ in range(2):
        buffer.learner.acquire_epoch()
    buffer.client.delete(*buffer.client.scan_iter(f"{key(buffer.run_id)}:*", count=1000))
    time.sleep(0.01)  # the clock is past the earlier epochs
    newer = make_buffer(buffer.client, buffer.run_id).start()
    newer.play(0)
    with pytest.raises(FencedOut):
        buffer.learner.claim(7, 1, policy_version=0, max_lag=5)
    assert ids(newer.learner.claim(8, 1, policy_version=0, max_lag=5)) == [0]


def test_a_learner_after_a_lost_end_of_the_log_is_above_the_one_before(buffer: Views) -> None:
    before = buffer.client.get(epoch_key(buffer.run_id))
    lost = make_buffer(buffer.client, buffer.run_id).start()
    buffer.client.set(epoch_key(buffer.run_id), before)
    time.sleep(0.01)
    make_buffer(buffer.client, buffer.run_id).start()
    with pytest.raises(FencedOut):
        lost.learner.open([ticket(0)])


def test_poison_is_set_aside_with_its_sender_and_the_claim_goes_on(buffer: Views) -> None:
    buffer.play(0, 1, 2)
    for group_id, payload in enumerate((b"\x00garbage", buffer.client.get(buffer.names("blob:2:0")[0]))):
        (blob,) = buffer.names(f"blob:{group_id}:0")
        buffer.client.set(blob, payload)
    assert buffer.claim(1, 3) == [2]
    stranger, garbage = buffer.quarantined()
    assert (garbage.actor, garbage.member) == ("a", 0)
    assert "shorter than its header" in garbage.reason or "magic" in garbage.reason
    assert "the ticket's is" in stranger.reason
    ledger = buffer.ledger
    assert (ledger.quarantined, ledger.claimed, ledger.held_trajectories) == (2, 1, 6)
    assert buffer.audit() == []


def test_poison_is_set_aside_also_where_its_sender_is_no_unicode(buffer: Views) -> None:
    lease = buffer.begin(ticket(0, num_members=1))
    blob = key(buffer.run_id, "train", "blob", 0, 0, 0, lease.fence)
    buffer.client.set(blob, b"poison", ex=60)
    record = b"0:%d:0:7:5:1:100:\xff" % lease.fence
    insert = buffer.actor._verbs._scripts["insert"]
    assert insert(keys=[buffer.base, blob], args=[0, 0, record, "shop", "0.0", "0"]) == b"stored"
    assert [group.members[0].actor for group in list_groups(buffer.client, buffer.run_id)] == ["\ufffd"]
    assert buffer.claim() == []
    assert buffer.quarantined()[0].actor == "\ufffd"


def test_a_lost_payload_drops_its_group_with_the_reason(buffer: Views) -> None:
    buffer.play(0, 1)
    buffer.client.delete(buffer.names("blob:0:1")[0])
    assert buffer.claim(1, 2) == [1]
    assert buffer.ledger.dropped == {"lost_payload": 1}
    assert buffer.audit() == []
