"""A ledger says whether it balances, and an audit finds what contradicts it."""

import pytest
import redis

from slipstream.replay.buffer.audit import audit
from slipstream.replay.records.keys import epoch_key
from slipstream.replay.records.ledger import read_ledger
from tests.replay.records.attempts import Views, leased, make_buffer, ticket

Commands = list[tuple[str | int, ...]]


@pytest.fixture
def buffer(redis_client: redis.Redis, run_id: str) -> Views:
    """Group 0 is ready, group 1 is leased with one of two members stored, group 2 is queued."""
    buffer = make_buffer(redis_client, run_id).start(ticket(0), ticket(1), ticket(2))
    for members in ((0, 1), (0,)):
        buffer.insert(leased(buffer), *members)
    assert buffer.audit() == []
    return buffer


def test_a_ledger_in_words_says_whether_it_balances(buffer: Views) -> None:
    shown = buffer.ledger.to_dict()
    assert shown["balanced"] is True
    assert (shown["opened"], shown["ready"], shown["leased"], shown["queued"]) == (3, 1, 1, 1)
    assert (shown["inserted"], shown["held_trajectories"], shown["dropped"]) == (3, 3, {})


def test_an_empty_run_has_balanced_books(redis_client: redis.Redis, run_id: str) -> None:
    assert read_ledger(redis_client, run_id).balanced
    assert audit(redis_client, run_id) == []
    assert redis_client.exists(epoch_key(run_id)) == 0


# Commands whose second word is a key of the stream, and how each line begins that the audit then writes.
DAMAGES: list[tuple[Commands, list[str]]] = [
    ([("HINCRBY", "counters", "ready", 1)], ["the books count 2 ready, the recount finds 1", "the books do not bal"]),
    (
        [("HINCRBY", "counters", "trajectories:held", 1)],
        ["the books count 4 held trajectories, the recount finds 3", "the books do not balance: {{'opened': 3"],
    ),
    ([("UNLINK", "blob:0:1:0:*")], ["group 0 (ready) lost its payload {payload}"]),
    ([("EXPIRE", "blob:0:1:0:*", 1000)], ["group 0 (ready) will lose its payload {payload}"]),
    (
        [("ZADD", "claimed", 1, 0)],
        [
            "the books count 0 claimed, the recount finds 1",
            "the books count 3 held trajectories, the recount finds 5",
            "group 0 is in 2 states at once",
            "group 0 (claimed) has score 1 in its state, expected -1",
        ],
    ),
    ([("ZREM", "queued", 2)], ["the books count 1 queued, the recount finds 0", "{base}:group:2 belongs to no group"]),
    ([("UNLINK", "group:2")], ["group 2 is queued, and its hash is missing", "the books count 1 queued, the re"]),
    ([("SET", "blob:5:0:0:1", "nobody's")], ["{base}:blob:5:0:0:1 belongs to no group"]),
    ([("ZREM", "ready_by_version", 0)], ["the index of ready groups by version is {{}}, expected {{'0': 0}}"]),
    ([("ZINCRBY", "ready", 6, 0)], ["group 0 (ready) has score 7 in its state, expected 1"]),
    ([("HSET", "group:2", "uses", "3,")], ["group 2 (queued) was used for steps [3]"]),
    ([("HDEL", "group:1", "fence")], ["group 1 (leased) has no fence"]),
    ([("HSET", "group:2", "fence", 1)], ["group 2 (queued) has a fence"]),
    (
        [("ZREM", "leased", 1), ("ZADD", "ready", 9, 1)],
        [
            "the books count 1 leased, the recount finds 0",
            "the books count 1 ready, the recount finds 2",
            "group 1 (ready) has 1 of 2 members",
            "group 1 (ready) has a fence",
            "group 1 (ready) has score 9 in its state, expected -1",
            "the index of ready groups by version is",
        ],
    ),
]


@pytest.mark.parametrize(("commands", "expected"), DAMAGES)
def test_the_audit_names_what_contradicts_the_books(buffer: Views, commands: Commands, expected: list[str]) -> None:
    (payload,) = (name.decode() for name in buffer.client.keys(f"{buffer.base}:blob:0:1:0:*"))
    for verb, name, *rest in commands:
        assert buffer.client.execute_command(verb, payload if "*" in str(name) else f"{buffer.base}:{name}", *rest)
    begins = [line.format(base=buffer.base, payload=payload) for line in expected]
    found = buffer.audit()
    assert len(found) == len(begins) and all(map(str.startswith, found, begins)), found


def test_the_audit_names_a_lost_partial(buffer: Views) -> None:
    lease = leased(buffer)
    buffer.actor.hand_in(lease, buffer.partial(lease, 0))
    assert buffer.audit() == []
    partial = f"{buffer.base}:partial:2:0:0:{lease.fence}"
    assert buffer.client.delete(partial) == 1
    assert buffer.audit() == [f"group 2 (leased) lost its payload {partial}"]


# Commands as above, and how the one line begins in which a repair says what it has removed.
REPAIRS: list[tuple[Commands, str]] = [
    ([("HDEL", "group:0", "num_members")], "group 0 (ready) lacks num_members"),
    ([("HSET", "group:0", "max_attempts", "x")], "group 0 (ready) has a malformed max_attempts"),
    ([("HSET", "group:2", "num_members", 0)], "group 2 (queued) has 0 members"),
    ([("HDEL", "group:2", "ticket")], "group 2 (queued) lacks its ticket"),
    ([("HSET", "group:0", "uses", "3,x,")], "group 0 (ready) has uses that are not steps"),
    ([("HDEL", "group:1", "fence")], "group 1 (leased) has a missing or malformed fence"),
    ([("ZREM", "ready", 0), ("ZADD", "claimed", 1, 0)], "group 0 (claimed) is claimed for no step"),
    ([("HSET", "group:1", "member:0", "x")], "group 1 (leased) has a malformed record of a stored member"),
    ([("HSET", "group:1", "attempt:1", "x")], "group 1 (leased) has a malformed count of attempts"),
    ([("HSET", "group:1", "partial:1", "x")], "group 1 (leased) has a malformed record of a partial"),
    ([("HSET", "group:1", "num_stored", 2)], "group 1 (leased) counts 2 stored members, and lists 1"),
    ([("ZREM", "leased", 1), ("ZADD", "ready", 9, 1)], "group 1 (ready) has 1 of 2 members"),
    ([("HSET", "group:0", "newest_policy_version", "x")], "group 0 (ready) has a missing or malformed newest policy"),
    ([("HSET", "group:0", "num_judgings", "x")], "group 0 (ready) has a malformed count of judgings"),
    ([("HSET", "group:0", "is_judged", 1)], "group 0 (ready) was not judged"),
    ([("HDEL", "group:0", "finished")], "group 0 (ready) has a missing or malformed order of finishing"),
    ([("HSET", "group:0", "finished", 10**13)], "group 0 (ready) has a missing or malformed order of finishing"),
    ([("DEL", "group:2"), ("SET", "group:2", "x")], "group 2 (queued) is stored in a key of another type"),
    ([("ZADD", "queued", 1, "x")], "group x (queued) is not a group id"),
    ([("ZADD", "queued", "inf", 2)], "group 2 (queued) was set back by an actor that could not use it"),
    ([("DEL", "ready"), ("SET", "ready", "x")], "{base}:ready was a string instead of a zset"),
    ([("HSET", "counters", "opened", "x")], "{base}:counters: opened was not a number"),
    ([("HSET", "counters", "opened", 10**12)], "{base}:counters: opened was not a number"),
    ([("HSET", "counters", "last_fence", 10**13)], "{base}:counters: last_fence was not a number"),
    ([("HSET", "counters", "tokens:shop", "1" * 19)], "{base}:counters: tokens:shop was not a number"),
    ([("HSET", "counters", "turns:shop", "-1")], "{base}:counters: turns:shop was not a number"),
    ([("HSET", "counters", "duration_ms:shop", "")], "{base}:counters: duration_ms:shop was not a number"),
    ([("HSET", "counters", "returns:shop", "inf")], "{base}:counters: returns:shop was not a number"),
]


@pytest.mark.parametrize(("commands", "expected"), REPAIRS)
def test_a_repair_removes_what_is_damaged_and_nothing_else(buffer: Views, commands: Commands, expected: str) -> None:
    sound = {"tokens:s": "1" * 18, "turns:s": "0", "returns:s": "-0.5", "returns:t": "1e300", "last_fence": 10**13 - 1}
    buffer.client.hset(f"{buffer.base}:counters", mapping=sound)
    for verb, name, *rest in commands:
        buffer.client.execute_command(verb, f"{buffer.base}:{name}", *rest)
    removed = [line for line in buffer.people.repair("a person asks") if line.endswith(": removed")]
    (line,) = [line for line in removed if "belonged to no group" not in line]
    assert line.startswith(expected.format(base=buffer.base))
    assert buffer.audit() == [] and buffer.ledger.balanced and buffer.ledger.repairs == 1
    held = buffer.client.hgetall(f"{buffer.base}:counters")
    assert {name for name in sound if name.encode() in held or name in expected} == sound.keys()


def test_accounts_whose_names_are_not_utf_8_count_in_the_sum(buffer: Views) -> None:
    """Both names become the same text, and the books balance, or the learner would repair them for ever."""
    buffer.learner.drop([0, 1], "surplus")
    counters = f"{buffer.base}:counters"
    buffer.client.hdel(counters, "dropped:surplus")
    buffer.client.hset(counters, mapping={b"dropped:\xff": 1, b"dropped:\xfe": 1})
    ledger = buffer.ledger
    assert (ledger.dropped, ledger.balanced, ledger.repairs) == ({"\ufffd": 2}, True, 0)
