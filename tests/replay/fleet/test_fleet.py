"""Who is alive, and how an actor joins a run."""

from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import redis

from slipstream.actors.host.beat import LastKnown
from slipstream.common.process.connection import connect
from slipstream.common.process.wire import encode
from slipstream.replay.fleet import fleet as fleet_module
from slipstream.replay.fleet.fleet import MEMBER_TTL_S, Fleet, Member, RunState, UnknownRun
from slipstream.replay.records.keys import key
from slipstream.tools.lab.loopback_server import start_server
from tests.replay.buffer.every_verb import FACTS, MEMBER
from tests.waiting import wait_until


@pytest.fixture
def fleet(redis_client: redis.Redis, run_id: str) -> Fleet:
    return Fleet(redis_client, run_id)


def member(name: str, *, generated_tokens: int = 0) -> Member:
    return msgspec.structs.replace(MEMBER, name=name, generated_tokens=generated_tokens)


def test_members_are_those_who_beat_by_name(fleet: Fleet, redis_client: redis.Redis, run_id: str) -> None:
    assert fleet.members() == []
    fleet.beat(member("b"))
    fleet.beat(member("a"))
    fleet.beat(member("b", generated_tokens=10))
    assert fleet.members() == [member("a"), member("b", generated_tokens=10)]
    assert Fleet(redis_client, run_id + "-other").members() == []


def test_a_member_that_stops_beating_is_gone_after_its_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as briefly:
        briefly.setattr(fleet_module, "MEMBER_TTL_S", 0.5)
        fleet.beat(member("silent"))
    fleet.beat(member("steady"))
    assert len(fleet.everyone()) == 2
    wait_until(lambda: len(fleet.members()) < 2, "the silent member to be gone", timeout_s=MEMBER_TTL_S - 5)
    assert fleet.members() == [member("steady")]


def test_a_census_reads_those_that_left_once_and_no_record_is_missed(
    fleet: Fleet, redis_client: redis.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, whole = Fleet(redis_client, run_id), Mock(wraps=fleet.everyone)
    monkeypatch.setattr(fleet, "everyone", whole)
    redis_client.hset(key(run_id, "fleet"), mapping={f"old-{i}": encode(member(f"old-{i}")) for i in range(50)})
    other.beat(member("a"))
    assert [len(each) for each in fleet.census()] == [1, 51] and whole.call_count == 1
    other.beat(member("a", generated_tokens=7))
    other.beat(member("b"))
    assert fleet.census().alive == [member("a", generated_tokens=7), member("b")]
    other.beat(member("a", generated_tokens=9))  # its last one
    other.leave("a")
    census = fleet.census()
    assert census.alive == [member("b")] and member("a", generated_tokens=9) in census.everyone
    assert len(census.everyone) == 52 and whole.call_count == 1
    other.beat(member("short"))
    other.leave("short")
    assert member("short") in fleet.census().everyone and whole.call_count == 2
    redis_client.delete(key(run_id, "fleet"), key(run_id, "fleet", "deadlines"))
    assert fleet.census() == ([], [])


def test_a_run_that_does_not_exist_is_answered_with_those_that_do(tmp_path: Path) -> None:
    with start_server(tmp_path) as server, connect(server.secret_url) as client:
        typo = Fleet(client, "typo")
        with pytest.raises(UnknownRun, match=r"`run.name` typo is not on this Redis server; it has no runs"):
            typo.run_facts()
        for name in ("shop-2", "shop-1"):
            Fleet(client, name).describe_run(FACTS)
        for ask in (typo.run_facts, typo.run_state):
            with pytest.raises(UnknownRun, match="it has the runs shop-1, shop-2; start the learner of this run"):
                ask()


def test_a_full_server_still_takes_beats_and_states(tmp_path: Path) -> None:
    with start_server(tmp_path) as server, connect(server.admin_url) as client:
        fleet = Fleet(client, "full")
        fleet.describe_run(FACTS)
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.OutOfMemoryError):
            client.set("anything", "else")
        fleet.beat(member("a"))
        fleet.set_run_state(RunState.FAILED)
        assert fleet.members() == [member("a")]
        assert fleet.run_state() is RunState.FAILED
        changed = msgspec.structs.replace(FACTS, vocab_size=101)
        fleet.describe_run(changed)
        assert fleet.run_facts() == changed
        assert client.exists(key("full", "fleet")) == 1


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff\xfe",
        encode(FACTS),
        encode(member("somebody-else")),
        encode(msgspec.structs.replace(member("evil"), price_per_hour=float("nan"))),
        encode(msgspec.structs.replace(member("evil"), num_episodes=-1)),
        encode(msgspec.structs.replace(member("evil"), generated_tokens=1 << 62)),
    ],
    ids=["empty", "no frame", "another record", "another's name", "nan", "below 0", "too many"],
)
def test_a_malformed_record_is_skipped_and_its_sender_is_logged(
    frame: bytes, fleet: Fleet, redis_client: redis.Redis, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.beat(member("a"))
    fleet.beat(member("evil"))
    redis_client.hset(key(run_id, "fleet"), "evil", frame)
    for _ in range(2):
        assert fleet.members() == fleet.everyone() == [member("a")]
        assert fleet.num_unreadable == 1
    assert caplog.text.count("fleet: evil is skipped") == 1


def test_what_was_said_of_a_run_is_said_again_where_it_is_gone(redis_client: redis.Redis, run_id: str) -> None:
    learner, actor = Fleet(redis_client, run_id), Fleet(redis_client, run_id)
    learner.describe_run(FACTS)
    learner.set_run_state(RunState.TRAINING)
    redis_client.set(key(run_id, "facts"), "forged")
    redis_client.delete(key(run_id, "state"))
    for ask in (actor.run_facts, actor.run_state):
        with pytest.raises(UnknownRun):
            ask()
    learner.renew()
    assert (actor.run_facts(), actor.run_state()) == (FACTS, RunState.TRAINING)


def test_no_host_keeps_up_an_absurd_number_of_actors(fleet: Fleet, redis_client: redis.Redis, run_id: str) -> None:
    with pytest.raises(ValueError, match=r"the number of actors on a host must be in \[0, 4096\], got 5000"):
        fleet.want_actors("host", 5000)
    redis_client.sadd(key(run_id, "fleet", "wanted", "host"), "99999")
    assert fleet.wanted_actors("host") is None


def test_an_actor_keeps_the_state_while_none_can_be_read(fleet: Fleet, redis_client: redis.Redis, run_id: str) -> None:
    fleet.set_run_state(RunState.STARTING)
    patient, impatient = (LastKnown(fleet, patience_s, play_root="") for patience_s in (60, 0))
    assert patient.state() is impatient.state() is RunState.STARTING
    redis_client.delete(key(run_id, "state"))
    assert patient.state() is RunState.STARTING
    with pytest.raises(UnknownRun):
        impatient.state()
    fleet.set_run_state(RunState.FINISHED)
    assert patient.state() is RunState.FINISHED


def test_a_fleet_of_thousands_is_read_whole(fleet: Fleet, redis_client: redis.Redis, run_id: str) -> None:
    """In several requests."""
    names = [f"actor-{number:04d}" for number in range(2001)]
    alive = fleet.beat(member(names[0]))
    redis_client.hset(key(run_id, "fleet"), mapping={name: encode(member(name)) for name in names})
    redis_client.zadd(key(run_id, "fleet", "deadlines"), dict.fromkeys(names, 1e15))
    assert [each.name for each in fleet.members()] == names
    assert (alive, fleet.beat(member(names[5]))) == (1, len(names))
