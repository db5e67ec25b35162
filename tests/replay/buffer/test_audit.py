"""A ledger says whether it balances, and an audit finds what contradicts it."""

import pytest
import redis

from slipstream.replay.buffer.audit import audit
from slipstream.replay.records.keys import epoch_key, key
from slipstream.replay.records.ledger import read_ledger
from tests.replay.records.attempts import Views, attempt_at, make_buffer, partial_of, ticket


@pytest.fixture
def buffer(redis_client: redis.Redis, run_id: str) -> Views:
    """Group 0 is ready, group 1 is leased with one of two members stored, group 2 is queued."""
    buffer = make_buffer(redis_client, run_id)
    buffer.learner.acquire_epoch()
    buffer.learner.open([ticket(0), ticket(1), ticket(2)])
    for members in ((0, 1), (0,)):
        lease = buffer.actor.lease("a")
        assert lease is not None
        for member in members:
            buffer.actor.insert(lease, attempt_at(lease, member, run_id=run_id))
    assert buffer.audit() == []
    return buffer


def test_a_ledger_in_words_says_whether_it_balances(buffer: Views) -> None:
    shown = buffer.learner.ledger().to_dict()
    assert shown["balanced"] is True
    assert (shown["opened"], shown["ready"], shown["leased"], shown["queued"]) == (3, 1, 1, 1)
    assert (shown["inserted"], shown["held_trajectories"], shown["dropped"]) == (3, 3, {})


def test_an_empty_run_has_balanced_books(redis_client: redis.Redis, run_id: str) -> None:
    assert read_ledger(redis_client, run_id).balanced
    assert audit(redis_client, run_id) == []
    assert redis_client.exists(epoch_key(run_id)) == 0


def test_the_audit_names_a_counter_that_was_changed(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    redis_client.hincrby(key(run_id, "train", "counters"), "ready", 1)
    found = buffer.audit()
    assert found[0] == "the books count 2 ready, the recount finds 1"
    assert found[1].startswith("the books do not balance: {'opened': 3")


def test_the_audit_names_a_trajectory_counted_twice(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    redis_client.hincrby(key(run_id, "train", "counters"), "trajectories:held", 1)
    assert buffer.audit()[0] == "the books count 4 held trajectories, the recount finds 3"


def stored_payload(redis_client: redis.Redis, run_id: str) -> str:
    """The key of what member 1 of group 0 played."""
    (name,) = redis_client.keys(key(run_id, "train", "blob", 0, 1, 0, "*"))
    return str(name.decode())


def test_the_audit_names_a_lost_payload(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    blob = stored_payload(redis_client, run_id)
    assert redis_client.delete(blob) == 1
    assert buffer.audit() == [f"group 0 (ready) lost its payload {blob}"]


def test_the_audit_names_a_payload_about_to_expire(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    blob = stored_payload(redis_client, run_id)
    assert redis_client.expire(blob, 1000) == 1
    assert buffer.audit() == [f"group 0 (ready) will lose its payload {blob}"]


def test_the_audit_names_a_group_in_two_states(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    redis_client.zadd(key(run_id, "train", "claimed"), {"0": 1})
    found = buffer.audit()
    assert "group 0 is in 2 states at once" in found
    assert "the books count 0 claimed, the recount finds 1" in found


def test_the_audit_names_a_group_that_is_nowhere(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    redis_client.zrem(key(run_id, "train", "queued"), "2")
    assert buffer.audit() == [
        "the books count 1 queued, the recount finds 0",
        f"{key(run_id, 'train', 'group', 2)} belongs to no group",
    ]


def test_the_audit_names_a_group_that_does_not_exist(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    redis_client.delete(key(run_id, "train", "group", 2))
    assert buffer.audit()[0] == "group 2 is queued, and its hash is missing"


def test_the_audit_names_an_unfinished_group_that_is_ready(
    buffer: Views, redis_client: redis.Redis, run_id: str
) -> None:
    redis_client.zrem(key(run_id, "train", "leased"), "1")
    redis_client.zadd(key(run_id, "train", "ready"), {"1": 9})
    assert "group 1 (ready) has 1 of 2 members" in buffer.audit()


def test_the_audit_names_a_stray_payload(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    stray = key(run_id, "train", "blob", 5, 0, 0, 1)
    redis_client.set(stray, b"nobody's")
    assert buffer.audit() == [f"{stray} belongs to no group"]


def test_the_audit_names_a_lost_partial(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    lease = buffer.actor.lease("a")
    assert lease is not None
    buffer.actor.hand_in(lease, partial_of(lease, 0, run_id=run_id))
    assert buffer.audit() == []
    partial = key(run_id, "train", "partial", 2, 0, 0, lease.fence)
    assert redis_client.delete(partial) == 1
    assert buffer.audit() == [f"group 2 (leased) lost its payload {partial}"]


def test_the_audit_names_an_index_that_forgot_a_group(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    assert redis_client.zrem(key(run_id, "train", "ready_by_version"), "0") == 1
    assert buffer.audit() == ["the index of ready groups by version is {}, expected {'0': 0}"]


def test_the_audit_names_a_group_at_the_wrong_place(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    redis_client.zadd(key(run_id, "train", "ready"), {"0": 7})
    assert buffer.audit() == ["group 0 (ready) has score 7 in its state, expected 1"]


def test_the_audit_names_a_use_that_no_group_should_have(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    redis_client.hset(key(run_id, "train", "group", 2), "uses", "3,")
    assert buffer.audit() == ["group 2 (queued) was used for steps [3]"]


@pytest.mark.parametrize("group_id, wrong", [(1, "group 1 (leased) has no fence"), (2, "group 2 (queued) has a fence")])
def test_the_audit_names_a_lease_without_a_fence_and_a_fence_without_a_lease(
    buffer: Views, redis_client: redis.Redis, run_id: str, group_id: int, wrong: str
) -> None:
    group = key(run_id, "train", "group", group_id)
    if not redis_client.hdel(group, "fence"):
        redis_client.hset(group, "fence", 1)
    assert buffer.audit() == [wrong]


def test_accounts_whose_names_are_not_utf_8_count_in_the_sum(buffer: Views, redis_client: redis.Redis) -> None:
    """Both names become the same text, and the books balance, or the learner would repair them for ever."""
    buffer.learner.drop([0, 1], "surplus")
    counters = f"{buffer.base}:counters"
    redis_client.hdel(counters, "dropped:surplus")
    redis_client.hset(counters, mapping={b"dropped:\xff": 1, b"dropped:\xfe": 1})
    ledger = buffer.learner.ledger()
    assert (ledger.dropped, ledger.balanced, ledger.repairs) == ({"\ufffd": 2}, True, 0)
