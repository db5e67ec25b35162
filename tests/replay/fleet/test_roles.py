"""Users of a shared server: each can do its part of a run, and nothing else."""

import contextlib
import inspect
import itertools
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import RedisUnreachable, connect, connect_or_explain
from slipstream.common.process.redis_retry import RedisAway
from slipstream.replay.buffer import actor_buffer, learner_buffer, people_buffer
from slipstream.replay.buffer.audit import audit
from slipstream.replay.buffer.repertoire import FILES, Repertoire
from slipstream.replay.buffer.verbs import ACTORS, LEARNERS, PEOPLES
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import RUNS_KEY, Fleet, RunState, UnknownRun
from slipstream.replay.fleet.roles import _ACTORS_COMMANDS, Role, acl_rules, user_of
from slipstream.replay.records import scripts
from slipstream.replay.records.keys import epoch_key, key
from slipstream.replay.records.ticket import InsertResult
from slipstream.replay.server.redis_server import find_executable
from slipstream.replay.server.redis_version import version_of
from slipstream.tools.access.access_users import UsersOptions
from slipstream.tools.cli.cli import main
from slipstream.tools.lab.loopback_server import Server, start_server
from tests.common.process.test_patience import Call
from tests.replay.buffer.every_verb import FACTS, play_every_verb
from tests.replay.records.attempts import attempt_at, leased, make_buffer, ticket
from tests.waiting import wait_until

RUN = "shop-1"
OTHER = "shop-2"
PASSWORD = "s3cret"
Enter = Callable[..., redis.Redis]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that knows the users of two runs, from its configuration file."""
    directory = tmp_path / "redis"
    start_server(directory).stop()
    with (directory / "redis.conf").open("a") as settings:
        if version_of(find_executable()) >= (7, 0, 0):  # else these are refused to all: no want of the right
            settings.write("enable-debug-command local\nenable-module-command local\n")
        for run_id in (RUN, OTHER):
            for role in Role:
                settings.write(f"user {user_of(run_id, role)} {' '.join(acl_rules(run_id, role, password=PASSWORD))}\n")
    with start_server(directory) as server:
        yield server


@pytest.fixture
def enter(server: Server) -> Iterator[Enter]:
    with contextlib.ExitStack() as clients:

        def enter(role: Role, run_id: str = RUN, *, patience_s: float = 60) -> redis.Redis:
            url = f"redis://{user_of(run_id, role)}:{PASSWORD}@127.0.0.1:{server.port}/0"
            return clients.enter_context(connect(url, patience_s=patience_s))

        yield enter


def test_each_role_can_do_its_part_of_every_verb(enter: Enter) -> None:
    learner = enter(Role.LEARNER)
    repertoire = Repertoire(learner)
    play_every_verb(RUN, learner=learner, actor=enter(Role.ACTOR), viewer=enter(Role.VIEWER))
    repertoire.close()
    assert audit(enter(Role.VIEWER), RUN) == []


def test_each_buffer_runs_the_scripts_of_its_role_and_every_script_is_in_the_repertoire() -> None:
    for module, verbs in ((learner_buffer, LEARNERS), (actor_buffer, ACTORS), (people_buffer, PEOPLES)):
        called = re.findall(r'\("(\w+)"|_verbs\.(quarantine|repair)\(', inspect.getsource(module))
        assert {name or other for name, other in called} & {*LEARNERS, *ACTORS, *PEOPLES} == set(verbs), module
    assert {path.stem for path in (scripts._DIRECTORY).glob("*.lua")} == {name for names in FILES for name in names}


def send_what_is_printed(administrator: redis.Redis, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Make or revoke a fleet's user as `| redis-cli` does; return the password."""
    assert main(["access", "users", f"run.name={RUN}", "--fleet=spot1", *options]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1
    administrator.execute_command(*printed.out.split())
    return printed.err.split()[-1] if printed.err else ""


def test_a_fleet_has_a_user_of_its_own_which_is_revoked_alone(
    server: Server, enter: Enter, capsys: pytest.CaptureFixture[str]
) -> None:
    with connect(server.admin_url, patience_s=10) as administrator:
        password = send_what_is_printed(administrator, capsys)
        repertoire = Repertoire(enter(Role.LEARNER))
        user = user_of(RUN, Role.ACTOR, fleet="spot1")
        mine = connect(f"redis://{user}:{password}@127.0.0.1:{server.port}/0", patience_s=1.0)
        make_buffer(enter(Role.LEARNER), RUN).start(ticket(1), ticket(2))
        played = make_buffer(mine, RUN)
        played.insert(leased(played))
        with pytest.raises(NoPermissionError):
            mine.execute_command("ACL", "LIST")

        send_what_is_printed(administrator, capsys, "--revoke")
        with pytest.raises(redis.ConnectionError, match="invalid username-password pair or user is disabled"):
            mine.get(key(RUN, "facts"))
        assert make_buffer(enter(Role.ACTOR), RUN).actor.lease("b") is not None
        repertoire.close()
        mine.close()


def test_a_stolen_user_that_fills_the_server_makes_runs_wait_and_is_revoked(
    server: Server, enter: Enter, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {run_id: make_buffer(enter(Role.LEARNER, run_id), run_id) for run_id in (RUN, OTHER)}
    others = make_buffer(enter(Role.ACTOR, OTHER), OTHER)
    repertoires = [Repertoire(books.client) for books in runs.values()]
    for run_id, books in runs.items():
        books.start(ticket(1), ticket(2))
        played = make_buffer(enter(Role.ACTOR, run_id), run_id)
        played.insert(leased(played))
    lease = leased(others, "b")
    with connect(server.admin_url, patience_s=10) as admin:
        password = send_what_is_printed(admin, capsys)
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] + (32 << 20))
        thief = redis.Redis(port=server.port, username=user_of(RUN, Role.ACTOR, fleet="spot1"), password=password)
        numbers = itertools.count(10)
        for num_bytes in (1 << 19, 1 << 12, 1 << 7):
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                for number in numbers:
                    for kind in ("blob", "partial"):
                        thief.set(key(RUN, "train", kind, number, 0, 0, 0), bytes(num_bytes), ex=10**8)
                    thief.hset(key(RUN, "train", "group", number), "x", bytes(num_bytes))

        attempt = attempt_at(lease, 0, run_id=OTHER)
        assert others.actor.insert(lease, attempt) is InsertResult.FULL
        assert others.actor.heartbeat("b", [lease]) == {2}
        assert len(runs[OTHER].claim()) == 1
        runs[OTHER].learner.settle(1)
        assert runs[OTHER].audit() == []

        send_what_is_printed(admin, capsys, "--revoke")
        with pytest.raises(redis.ConnectionError):
            thief.ping()
        assert len(runs[RUN].people.repair("a stolen user has filled the server")) > 20
        assert others.actor.insert(lease, attempt) is InsertResult.STORED
        assert [books.audit() for books in runs.values()] == [[], []]
        assert admin.info("memory")["used_memory"] < admin.info("memory")["maxmemory"] - (30 << 20)
    for repertoire in repertoires:
        repertoire.close()


def test_a_fleet_of_one_run_has_no_user_of_another_run() -> None:
    assert user_of("demo", Role.ACTOR, fleet="learner") == user_of("demo-actor", Role.LEARNER)  # so it is refused
    for fleet in ("learner", "viewer", "spot-1"):
        with pytest.raises(ConfigError, match=r"--fleet.*none of learner, actor, viewer"):
            UsersOptions(fleet=fleet)
            pytest.fail(f"{fleet} was accepted")
    runs, fleets = ("demo", "demo-actor", "demo-actor-spot1"), ("", "spot1", "Learner")
    users = [user_of(run_id, Role.ACTOR, fleet=UsersOptions(fleet=fleet).fleet) for run_id in runs for fleet in fleets]
    users += [user_of(run_id, role) for run_id in runs for role in Role if role is not Role.ACTOR]
    assert len(users) == len(set(users))


# Commands, without a space in any argument.
NOBODY_MAY = [
    *("EVAL return 0", "CONFIG GET requirepass", "CONFIG SET maxmemory 1", "FLUSHALL", "FLUSHDB", "KEYS *", "SHUTDOWN"),
    *("ACL LIST", "DEBUG SLEEP 0", "SCRIPT FLUSH", "MODULE LIST", "MODULE LOAD /tmp/x.so", "MIGRATE h 1 k 0 1"),
    *("REPLICAOF NO ONE", "CLIENT LIST", "MONITOR", "BGREWRITEAOF", "PUBLISH x y", "CLUSTER RESET", "CLUSTER NODES"),
    *(f"GET {key(OTHER, 'epoch')}", f"SET {key(OTHER, 'epoch')} 1", f"UNLINK {key(OTHER, 'train', 'blob', 0)}"),
    "SET something 1",
]
EPOCH, STATE, BLOB = epoch_key(RUN), key(RUN, "state"), key(RUN, "train", "blob", 0)
NO_ACTOR_MAY = [
    *("SCRIPT LOAD return", "SCAN 0", "RANDOMKEY", "DBSIZE"),
    *(f"SET {EPOCH} 7", f"GET {EPOCH}", f"DEL {EPOCH}", f"INCR {EPOCH}"),
    *(f"ZADD {key(RUN, 'train', 'claimed')} 1 0", f"ZREM {key(RUN, 'train', 'quarantined')} 0"),
    *(f"HSET {key(RUN, 'weights', 'version')} policy_version 9", f"SADD {key(RUN, 'weights', 'latest')} forged"),
    *(f"SADD {STATE} finished", f"RENAME {BLOB} {STATE}", f"SUNIONSTORE {STATE} slipstream:runs"),
    *(f"RESTORE {STATE} 0 x", f"COPY {key(RUN, 'fleet')} {STATE}"),
]
NO_VIEWER_MAY = [
    *("SCRIPT LOAD return", f"SET {BLOB} x", f"UNLINK {BLOB}", f"HSET {key(RUN, 'train', 'counters')} trained 7"),
    *(f"SADD {STATE} finished", f"SET {EPOCH} 7", f"PERSIST {key(RUN, 'facts')}", f"EXPIRE {key(RUN, 'facts')} 1"),
    *(f"XADD {key(RUN, 'x')} * a b", f"LPUSH {key(RUN, 'train', 'failures')} x"),
]


def test_a_role_may_do_nothing_else(server: Server, enter: Enter) -> None:
    for role, more in ((Role.LEARNER, []), (Role.ACTOR, NO_ACTOR_MAY), (Role.VIEWER, NO_VIEWER_MAY)):
        client = enter(role)
        for command in [*NOBODY_MAY, *more]:
            with pytest.raises(NoPermissionError):
                client.execute_command(*command.split())
                pytest.fail(f"{role} may {command}")
    with connect(server.secret_url) as admin:
        assert admin.dbsize() == 0


# Each command of an actor's user that takes a key, with what may follow the key.
WITH_KEY: dict[str, list[str]] = {
    **{name: [] for name in ("type", "get", "mget", "persist", "unlink", "del", "zcard", "srandmember", "smembers")},
    **{name: ["x"] for name in ("hget", "hdel", "hmget", "hexists", "zrem", "zscore", "set", "lpush")},
    **{name: ["0", "1"] for name in ("zrange", "zrangebyscore", "zremrangebyscore", "ltrim")},
    **{name: ["x", "1"] for name in ("hincrby", "hincrbyfloat")},
    "hset": ["x", "1"],
    "zadd": ["1", "x"],
    "expire": ["60"],
}
OUT_OF_REACH = [
    RUNS_KEY,
    key(OTHER, "judge:spent"),
    key(OTHER, "train", "blob", 0),
    *(key(RUN, name) for name in ("epoch", "highest_version", "weights:version")),
    *(key(RUN, "train", name) for name in ("claimed", "quarantined", "dropped", "settled")),
]


def test_no_command_of_an_actor_reaches_a_key_of_others(server: Server, enter: Enter) -> None:
    actor = enter(Role.ACTOR)
    assert {*WITH_KEY, "multi", "exec", "xread"} == set(_ACTORS_COMMANDS)
    for command, rest in WITH_KEY.items():
        for name in OUT_OF_REACH:
            with pytest.raises(NoPermissionError):
                actor.execute_command(command, name, *rest)
                pytest.fail(f"an actor may {command} {name}")
        assert actor.execute_command("type", key(RUN, "judge:spent")) == b"none"
    for name in OUT_OF_REACH:
        with pytest.raises(NoPermissionError):
            actor.execute_command("XREAD", "STREAMS", name, "0")
    with pytest.raises(UnknownRun, match="has not described the run"):
        Fleet(actor, RUN).run_facts()
    with connect(server.secret_url) as admin:
        assert admin.dbsize() == 0


def test_an_actor_cannot_act_as_a_learner_by_its_scripts(server: Server, enter: Enter) -> None:
    learner, actor = enter(Role.LEARNER), enter(Role.ACTOR)
    Repertoire(learner).close()
    books, forger = make_buffer(learner, RUN).learner, make_buffer(actor, RUN)
    epoch = books.acquire_epoch()
    books.open([ticket(group_id) for group_id in range(3)])
    forger.learner.adopt_epoch(epoch + 1)
    before = everything(server)
    attempts: list[Callable[[], object]] = [
        forger.learner.acquire_epoch,
        lambda: forger.learner.open([ticket(9)]),
        lambda: forger.learner.claim(1, 1, policy_version=0, max_lag=0),
        lambda: forger.learner.drop([0], "spite"),
        lambda: forger.learner.settle(1),
        lambda: forger.learner.reopen(0),
        lambda: forger.people.quarantine(0, "spite"),
        lambda: forger.people.requeue([0]),
        lambda: Bulletin(actor, RUN).next_invitation(),
    ]
    for attempt in attempts:
        with pytest.raises(redis.ResponseError, match=r"user executing the script can't|[Nn]o permissions"):
            attempt()
    assert everything(server) == before
    # Taking a notice down is spoiling; putting another up in its place is not to be had.
    Fleet(learner, RUN).describe_run(FACTS)
    Fleet(learner, RUN).set_run_state(RunState.TRAINING)
    with pytest.raises(redis.ResponseError):
        Fleet(actor, RUN).set_run_state(RunState.FINISHED)
    actor.set(key(RUN, "facts"), "forged")
    with pytest.raises(UnknownRun):
        Fleet(actor, RUN).run_facts()


def everything(server: Server) -> dict[bytes, object]:
    with connect(server.secret_url) as admin:
        return {name: admin.dump(name) for name in admin.keys("*")}


def test_an_actor_waits_aloud_for_scripts_that_a_restart_took(
    server: Server, enter: Enter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    learner, actor = enter(Role.LEARNER), enter(Role.ACTOR)
    first = Repertoire(learner)
    make_buffer(learner, RUN).start(ticket(0))
    played = make_buffer(actor, RUN).actor
    first.close()  # the learner is away as well
    start_without_scripts(server)
    leasing = Call(lambda: played.lease("a"))
    wait_until(lambda: "the run's scripts are not loaded, and this user may not load them" in caplog.text)
    assert leasing.thread.is_alive()
    second = Repertoire(learner)
    lease = leasing.wait()
    assert lease is not None

    start_without_scripts(server)  # and now the learner is there, and loads them by itself
    assert played.heartbeat("a", [lease]) == {0}  # type: ignore[list-item]
    wait_until(lambda: "had lost the run's scripts: loaded again" in caplog.text)
    second.close()


def start_without_scripts(server: Server) -> None:
    """Kill it and start it again from a rewritten file, which holds no scripts, as no file does from version 7 on."""
    with connect(server.secret_url) as admin:
        admin.bgrewriteaof()
        wait_until(lambda: admin.info("persistence")["aof_rewrite_in_progress"] == 0)
        server.process.kill()
        server.process.wait()
        server.keep_up()


def test_a_stranger_is_refused(server: Server, enter: Enter) -> None:
    for user in (f"{user_of(RUN, Role.ACTOR)}:wr0ng@", ""):
        with pytest.raises(RedisUnreachable, match="refused the password"):
            connect_or_explain(f"redis://{user}127.0.0.1:{server.port}")
    with pytest.raises(RedisAway, match="scripts are not loaded"):
        make_buffer(enter(Role.ACTOR, patience_s=0.2), RUN).actor.lease("a")


def test_the_printed_users_can_be_made(redis_server: Server, run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["access", "users", f"run.name={run_id}"]) == 0
    printed, told = capsys.readouterr()
    with connect(redis_server.admin_url) as admin:
        for line in printed.splitlines():
            assert admin.execute_command(*line.split())
        for role, line in zip(Role, told.splitlines(), strict=True):
            who, password = line.removeprefix(f"{role.value}: user ").split(", password ")
            assert who == user_of(run_id, role) and password not in printed
            with connect_or_explain(f"redis://{who}:{password}@127.0.0.1:{redis_server.port}") as client:
                assert client.ping()
            admin.acl_deluser(who)
