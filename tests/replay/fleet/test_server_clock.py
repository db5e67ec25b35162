"""A Redis server whose clock jumps: leases and members end after their time, and not an hour later."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from slipstream.common.process.connection import connect
from slipstream.replay.fleet import fleet as fleet_module
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import Fleet
from slipstream.replay.server import redis_server
from slipstream.replay.server.redis_server import find_executable
from slipstream.tools.lab.loopback_server import start_server
from tests.replay.fleet.test_fleet import member
from tests.replay.records.attempts import make_buffer, ticket
from tests.waiting import wait_until

HOUR_S = 3600
LEASE_TTL_S = 1.0
FOLDER = Path("/usr/lib")
LIBRARY = "*/faketime/libfaketime.so.1"
REFRESH_S = 1  # the server notices a change after this time


class Clock:
    """The wall clock of the processes that `program` starts; their monotonic clock is the machine's."""

    def __init__(self, directory: Path, program: str) -> None:
        """`directory` gets a program of the same name as `program`, which starts it with this clock."""
        library = next(FOLDER.glob(LIBRARY), None)
        if library is None:
            raise FileNotFoundError(f"{FOLDER / LIBRARY} is missing; install it: apt-get install libfaketime")
        directory.mkdir(parents=True)
        self._difference = directory / "difference"
        self.set(0)
        self.program = directory / Path(program).name
        self.program.write_text(
            f"#!/bin/sh\nexec env LD_PRELOAD={library} DONT_FAKE_MONOTONIC=1 FAKETIME_CACHE_DURATION={REFRESH_S} "
            f"FAKETIME_TIMESTAMP_FILE='{self._difference}' '{program}' \"$@\"\n"
        )
        self.program.chmod(0o755)

    def set(self, difference_s: int) -> None:
        """Set it to so many seconds after the machine's clock."""
        new = self._difference.with_suffix(".new")
        new.write_text(f"{difference_s:+d}\n")
        new.replace(self._difference)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "clock", find_executable())


@pytest.fixture
def client(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[redis.Redis]:
    """Of a server with that clock."""
    monkeypatch.setattr(redis_server, "_bundled", lambda: str(clock.program))
    with start_server(tmp_path / "redis") as server, connect(server.secret_url) as client:
        yield client


@pytest.mark.parametrize("difference_s", [HOUR_S, -HOUR_S], ids=["ahead", "back"])
def test_a_member_that_died_is_gone_after_its_time_and_its_group_is_given_to_the_next(
    difference_s: int, client: redis.Redis, clock: Clock, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "MEMBER_TTL_S", LEASE_TTL_S)
    fleet, bulletin = Fleet(client, run_id), Bulletin(client, run_id)
    buffer = make_buffer(client, run_id, lease_ttl_s=LEASE_TTL_S).start(ticket(0))
    fleet.beat(member("dead"))
    bulletin.join_broadcast("dead", ttl_s=LEASE_TTL_S)
    assert buffer.actor.lease("dead") is not None
    clock.set(difference_s)
    wait_until(lambda: abs(client.time()[0] - time.time() - difference_s) < HOUR_S / 2, "the server's clock jumps")
    wait_until(lambda: buffer.actor.lease("heir") is not None, "the dead actor's lease ends")
    assert buffer.ledger.expired_leases == 1 and buffer.audit() == []

    def only_the_other_is_left() -> bool:
        fleet.beat(member("alive"))
        bulletin.join_broadcast("alive", ttl_s=LEASE_TTL_S)
        return fleet.members() == [member("alive")] and bulletin.broadcast_members() == ["alive"]

    wait_until(only_the_other_is_left, "the dead member is gone")
