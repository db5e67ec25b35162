"""The server has no room, in memory or on disk: who waits, and what is kept."""

import resource
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
import redis

from slipstream.common.process.connection import connect
from slipstream.common.records.trajectory import Trajectory
from slipstream.replay.records.ledger import read_ledger
from slipstream.replay.records.ticket import InsertResult, Lease
from slipstream.replay.server import redis_server
from slipstream.replay.server.redis_server import find_executable
from slipstream.tools.lab.loopback_server import Server, start_server
from slipstream.tools.lab.soak.cast import Cast
from tests.link import POLL_S
from tests.replay.records.attempts import Views, attempt_at, make_buffer, ticket
from tests.stand_ins import aof_of, await_lease, books_of, make_cast, playing, server, views_of, wait_for_answers
from tests.waiting import DEADLINE_S, wait_until

__all__ = ["server"]  # the fixture


def test_a_full_memory_makes_actors_wait_until_it_is_drained(tmp_path: Path, server: Server, run_id: str) -> None:
    cast = make_cast(tmp_path, server, run_id, num_tokens=12_000, checkpoint_every=1)
    with connect(server.admin_url) as client, playing(cast):
        wait_for_answers(cast, 30)
        # A trajectory takes 54 KB: there is room for 14, and 6 queued groups of 4 have more, though some are dropped.
        # With more than 8 of the 12 open groups queued, the rest may not fill a step, and only steps make room again.
        wait_until(lambda: 6 <= read_ledger(client, run_id).queued <= 8, "6 to 8 groups are queued")
        cast.learner.send(signal.SIGSTOP)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (3 << 18))
        wait_until(lambda: num_full(cast) > 4, "actors hear that there is no room")
        num_stored = len(cast.answers()) - num_full(cast)
        assert read_ledger(client, run_id).balanced
        assert all(child.exit_code is None for child in cast.everyone)
        cast.learner.send(signal.SIGCONT)
        wait_until(lambda: len(cast.answers()) - num_full(cast) > num_stored + 50, "the buffer drains and fills again")
        print(f"{num_full(cast)} inserts found no room")
        books_of(cast, client)


def num_full(cast: Cast) -> int:
    return sum(answer.result is InsertResult.FULL for answer in cast.answers())


def test_with_fsync_every_second_a_full_disk_makes_everyone_wait_and_say_so(
    tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may write no further into its file, as on a full disk: every write is refused, a DEL too."""
    with (
        server_that_survives_a_full_disk(tmp_path, monkeypatch) as server,
        connect(server.admin_url) as client,
        playing(make_cast(tmp_path, server, run_id)) as cast,
    ):
        client.config_set("appendfsync", "everysec")
        wait_for_answers(cast, 100)
        buffer = views_of(cast, client)
        mine = await_lease(buffer)
        file = aof_of(server.directory)
        limit = file.stat().st_size + 20_000
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        wait_until(lambda: client.info("persistence")["aof_last_write_status"] == "err", "the server's disk is full")
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            redis.Redis.from_url(server.secret_url, retry=None, protocol=2).set("anything", 1)
        trajectory = attempt_at(mine, min(mine.missing), run_id=run_id)
        inserted: list[InsertResult] = []
        waiting = threading.Thread(target=lambda: inserted.append(insert_when_there_is_room(buffer, mine, trajectory)))
        waiting.start()
        stands_still = read_ledger(client, run_id)
        wait_until(lambda: all("MISCONF" in child.log.read_text() for child in cast.everyone), "everyone says so")
        assert read_ledger(client, run_id) == stands_still
        assert all(child.exit_code is None for child in cast.everyone)
        assert file.stat().st_size <= limit

        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(f"resumed {wait_for_answers(cast, 1):.1f} s after there was room")
        waiting.join(DEADLINE_S)
        assert inserted and inserted[0] in (InsertResult.STORED, InsertResult.FENCED), "it may have lost its lease"
        buffer.actor.release(mine)
        wait_for_answers(cast, 100)
        books_of(cast, client)


def insert_when_there_is_room(buffer: Views, lease: Lease, trajectory: Trajectory) -> InsertResult:
    """As actors do: an insert waits by itself, or says FULL and is made again."""
    while (result := buffer.actor.insert(lease, trajectory)) is InsertResult.FULL:
        time.sleep(POLL_S)
    return result


def test_with_fsync_always_a_full_disk_ends_the_server_and_loses_nothing(
    tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_that_survives_a_full_disk(tmp_path, monkeypatch) as server, connect(server.secret_url) as client:
        buffer = make_buffer(client, run_id).start(*(ticket(group_id, num_members=1) for group_id in range(500)))
        limit = aof_of(server.directory).stat().st_size + 200_000
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        num_stored = 0
        with connect(server.secret_url, patience_s=0.5) as impatient:
            actor = make_buffer(impatient, run_id)
            with pytest.raises(redis.ConnectionError):
                while True:
                    actor.insert(await_lease(actor), 0)
                    num_stored += 1
        assert server.process.wait(DEADLINE_S) == 1
        log = (server.directory / "redis.log").read_text()
        assert "Can't recover from AOF write error when the AOF fsync policy is 'always'" in log
        with start_server(server.directory):
            assert num_stored > 10 and buffer.ledger.inserted >= num_stored
            assert buffer.audit() == []


def server_that_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """One whose write fails past RLIMIT_FSIZE, with EFBIG for ENOSPC; by default the kernel would kill it."""
    executable = find_executable()
    wrapper = tmp_path / "bin" / "redis-server"
    wrapper.parent.mkdir()
    wrapper.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec {executable} \"$@\"\n")
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(redis_server, "_bundled", lambda: str(wrapper))
    return start_server(tmp_path / "redis")
