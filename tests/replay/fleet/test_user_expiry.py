"""Redis users with an end date: who revokes them, when, and that it ends their connections."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import redis
from redis.exceptions import NoPermissionError

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect
from slipstream.replay.fleet.roles import Role, acl_rules, user_of
from slipstream.replay.fleet.user_expiry import LABEL, Revoker, expiry_rules, revoke_expired
from slipstream.replay.records.keys import key
from slipstream.replay.server.redis_server import Server, start_server
from slipstream.tools.access.access_options import UsersOptions
from slipstream.tools.cli.cli import main
from tests.waiting import wait_until

RUN, PASSWORD, DEADLINE_S = "shop-1", "s3cret", 60.0
PAST, FUTURE = 1_700_000_000, 9_999_999_999


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which tests make users, who are gone after each."""
    with start_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def administrator(server: Server) -> Iterator[redis.Redis]:
    with connect(server.admin_url, patience_s=10) as client:
        yield client
        client.execute_command("ACL", "DELUSER", "nobody", *names(client))


def create(administrator: redis.Redis, fleet: str, *date: str, run_id: str = RUN, role: Role = Role.ACTOR) -> str:
    name = user_of(run_id, role, fleet=fleet)
    administrator.execute_command("ACL", "SETUSER", name, *acl_rules(run_id, role, password=PASSWORD), *date)
    return name


def names(administrator: redis.Redis) -> set[str]:
    return {name.decode() for name in administrator.execute_command("ACL", "USERS")} - {"default", "slipstream-admin"}


def enter(server: Server, name: str, password: str = PASSWORD) -> redis.Redis:
    return redis.Redis(port=server.port, username=name, password=password)


def test_users_whose_date_has_passed_are_removed_and_disconnected(server: Server, administrator: redis.Redis) -> None:
    over = create(administrator, "over", *expiry_rules(PAST))
    valid = create(administrator, "valid", *expiry_rules(FUTURE))
    undated = create(administrator, "")
    other_run = create(administrator, "over", *expiry_rules(PAST), run_id="shop-1-actor")
    with enter(server, over) as his, enter(server, valid) as hers:
        assert his.get(key(RUN, "facts")) is None and hers.get(key(RUN, "facts")) is None
        connection = his.connection_pool.get_connection()
        assert revoke_expired(administrator, RUN) == [over]
        assert names(administrator) == {valid, undated, other_run}
        connection.send_command("GET", key(RUN, "facts"))
        with pytest.raises(redis.ConnectionError):
            connection.read_response()
        assert hers.get(key(RUN, "facts")) is None
    assert revoke_expired(administrator, RUN) == []


def test_a_date_gives_no_right_and_its_user_cannot_change_it(server: Server, administrator: redis.Redis) -> None:
    with enter(server, create(administrator, "spot", *expiry_rules(FUTURE))) as mine:
        for command in (
            ["SUBSCRIBE", LABEL[1:] + str(FUTURE)],
            ["PUBLISH", LABEL[1:] + str(FUTURE), "x"],
            ["ACL", "SETUSER", user_of(RUN, Role.ACTOR, fleet="spot"), f"{LABEL}{FUTURE + 1}"],
            ["ACL", "LIST"],
        ):
            with pytest.raises(NoPermissionError):
                mine.execute_command(*command)


@pytest.mark.parametrize("date", ["soon", "", "-1", "9" * 13, "1e99", "²"])
def test_a_date_that_cannot_be_read_counts_as_passed(administrator: redis.Redis, date: str) -> None:
    name = create(administrator, "spot", "resetchannels", f"{LABEL}{date}")
    assert revoke_expired(administrator, RUN) == [name]


def test_a_learner_that_may_use_acl_revokes_and_one_that_may_not_goes_on(
    server: Server, administrator: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.replay.fleet.user_expiry.CHECK_EVERY_S", 0.05)
    learner = create(administrator, "", role=Role.LEARNER)
    with enter(server, learner) as client:
        Revoker(client, RUN)
        wait_until(lambda: not any(thread.name == "revoke-expired" for thread in threading.enumerate()))
    revoker = Revoker(administrator, RUN)
    create(administrator, "spot", *expiry_rules(int(administrator.time()[0]) + 1))
    wait_until(lambda: names(administrator) == {learner})
    revoker.close()
    wait_until(lambda: not any(thread.name == "revoke-expired" for thread in threading.enumerate()))


def test_a_fleet_of_one_run_has_no_user_of_another_run() -> None:
    assert user_of("demo", Role.ACTOR, fleet="learner") == user_of("demo-actor", Role.LEARNER)  # so it is refused
    with pytest.raises(ConfigError, match="--fleet"):
        UsersOptions(fleet="learner")
    runs, fleets = ("demo", "demo-actor", "demo-actor-spot1"), ("", "spot1", "Learner")
    users = [user_of(run_id, Role.ACTOR, fleet=UsersOptions(fleet=fleet).fleet) for run_id in runs for fleet in fleets]
    users += [user_of(run_id, role) for run_id in runs for role in Role if role is not Role.ACTOR]
    assert len(users) == len(set(users))


def test_the_printed_user_has_its_date_and_the_enforcing_verb_ends_it(
    server: Server, administrator: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["access", "users", f"run.name={RUN}", "--fleet=spot1", "--expires=1s"]) == 0
    printed = capsys.readouterr()
    administrator.execute_command(*printed.out.split())
    assert "it ends at " in printed.err and "slipstream access users --enforce" in printed.err
    verb = ["access", "users", f"run.name={RUN}", f"redis.url={server.admin_url}", "--enforce"]
    command = [sys.executable, "-m", "slipstream.tools.cli.cli", *verb]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.start()
        assert "revoking users of shop-1" in process.stdout.readline()
        assert process.stdout.readline() == "revoked slipstream-shop-1-actor-spot1\n"
        process.terminate()
    deadline.cancel()
    assert names(administrator) == set()


def test_enforcing_without_the_right_is_refused(
    server: Server, administrator: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = create(administrator, "", role=Role.LEARNER)
    url = f"redis://{learner}:{PASSWORD}@127.0.0.1:{server.port}"
    assert main(["access", "users", f"run.name={RUN}", f"redis.url={url}", "--enforce"]) == 2
    assert "may not use ACL LIST and ACL DELUSER; give an administrator's" in capsys.readouterr().err
    assert main(["access", "users", f"run.name={RUN}", "--enforce"]) == 2
    assert "`redis.url` is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expires": "24"}, "--expires.*a number and s, m, h or d.*got"),
        ({"expires": "0h"}, "--expires"),
        ({"expires": "-1h"}, "--expires"),
        ({"expires": "1w"}, "--expires"),
        ({"expires": "24h"}, "give --fleet NAME"),
        ({"expires": "24h", "fleet": "a", "revoke": True}, "leave out --revoke"),
        ({"enforce": True, "fleet": "a"}, "give no other option"),
        ({"enforce": True, "revoke": True}, "give no other option"),
        ({"fleet": "viewer"}, "--fleet.*none of learner, actor, viewer"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UsersOptions(**options)  # type: ignore[arg-type]
