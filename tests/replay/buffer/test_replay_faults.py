"""Processes killed and stopped, servers killed and stopped; each test sees that its fault did fire.

The processes are stand-ins, whose journals have the answers to their inserts.
"""

import contextlib
import fcntl
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from slipstream.common.process.connection import connect
from slipstream.replay.buffer.actor_buffer import ORPHAN_TTL_S
from slipstream.tools.lab.loopback_server import Server, start_server
from slipstream.tools.lab.soak.cast import Cast
from slipstream.tools.run.child import Child
from tests.proxy import Fault, Nth, Proxy
from tests.replay.records.attempts import Views, make_buffer, ticket
from tests.stand_ins import await_lease, books_of, make_cast, playing, server, views_of, wait_for_answers
from tests.waiting import DEADLINE_S, wait_until

__all__ = ["server"]  # the fixture

NUM_REDIS_KILLS = int(os.environ.get("SLIPSTREAM_REDIS_KILLS", "3"))
STOPPED_S = float(os.environ.get("SLIPSTREAM_STOPPED_S", "8"))
RESUMED_S = 30.0  # 5 s on a machine that has nothing else to do; the measured time is printed


# --- An actor is killed in mid-insert.


class AtCommit:
    """The fault strikes the script that names the first payload: the commit of an insert."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._payload = b""  # its key
        self._is_spent = False

    def __call__(self, request: list[bytes]) -> Fault:
        if request[0].upper() == b"SET":
            self._payload = self._payload or request[1]
        elif self._payload in request and not self._is_spent:
            self._is_spent = True
            return self._fault
        return Fault.NONE


@pytest.mark.parametrize(
    ("fault", "num_blobs", "num_inserted"),
    [(Fault.SWALLOW, 0, 0), (Fault.SWALLOW, 1, 0), (Fault.WITHHOLD_REPLY, 1, 1)],
    ids=["before the payload", "between payload and commit", "after the commit, before the reply"],
)
def test_an_actor_killed_in_an_insert_leaves_it_whole_or_not_at_all(
    fault: Fault, num_blobs: int, num_inserted: int, tmp_path: Path, server: Server, run_id: str
) -> None:
    with connect(server.secret_url) as client, Proxy(server.port) as proxy:
        cast = make_cast(tmp_path, server, run_id, url=f"redis://127.0.0.1:{proxy.port}/0", lease_ttl_s=4.0)
        other = make_buffer(client, "no interest").start(ticket(0))
        other.insert(await_lease(other), 0)  # it loads the scripts: a commit is one request from then on
        buffer = views_of(cast, client).start(ticket(0, num_members=2))
        proxy.judge = AtCommit(fault) if num_blobs else Nth(fault, only=b"SET")
        victim = cast.stand_in("actor-victim")
        victim.start()
        wait_until(lambda: proxy.done[fault] == 1, "the insert is held where it is")
        victim.send(signal.SIGKILL)
        victim.wait(DEADLINE_S)
        assert victim.exit_code == -signal.SIGKILL
        assert cast.answers() == []

        # The server may read what reached it on the victim's connection after it was asked on this one.
        wait_until(lambda: len(buffer.names("blob")) == num_blobs, "the payload is stored")
        assert buffer.ledger.inserted == num_inserted and buffer.audit() == []
        orphans = [blob for blob in buffer.names("blob") if client.ttl(blob) >= 0]
        assert len(orphans) == num_blobs - num_inserted
        assert all(0 < client.ttl(orphan) <= ORPHAN_TTL_S for orphan in orphans)
        assert buffer.claim() == []

        heir = await_lease(buffer)
        assert len(heir.missing) == 2 - num_inserted
        buffer.insert(heir)
        (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
        assert [t.member for t in group.trajectories] == [0, 1]
        assert buffer.learner.settle(1) == 1
        for orphan in orphans:
            assert client.pexpire(orphan, 1)
        wait_until(lambda: not buffer.names("blob"), "no payload is left")
        ledger = buffer.ledger
        assert (ledger.trained, ledger.inserted, ledger.trained_trajectories) == (1, 2, 2)
        assert ledger.balanced and buffer.audit() == []


# --- The server is killed, stopped, cut off, or loads.


def test_no_acknowledged_insert_is_lost_however_often_the_server_is_killed(tmp_path: Path, run_id: str) -> None:
    directory = tmp_path / "redis"
    server = start_server(directory)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: server.stop())
        client = stack.enter_context(connect(server.secret_url))
        with connect(server.admin_url) as admin:
            assert admin.config_get("appendfsync") == {"appendfsync": "always"}
        cast = stack.enter_context(playing(make_cast(tmp_path, server, run_id)))
        resumed_s = []
        for _ in range(NUM_REDIS_KILLS):
            wait_for_answers(cast, 100)
            server.process.kill()
            assert server.process.wait() == -signal.SIGKILL
            server = start_server(directory)  # returns once it says PONG
            resumed_s.append(wait_for_answers(cast, 1))
        wait_for_answers(cast, 100)
        accounts = books_of(cast, client)
        print(f"{accounts.num_acknowledged} acknowledged, resumed after {resumed_s} s")
        assert max(resumed_s) < RESUMED_S
        assert client.info("stats")["total_commands_processed"] > 0 and len(resumed_s) == NUM_REDIS_KILLS


def test_a_server_that_stands_still_stops_nobody_for_good(tmp_path: Path, server: Server, run_id: str) -> None:
    with connect(server.secret_url) as client, playing(make_cast(tmp_path, server, run_id)) as cast:
        wait_for_answers(cast, 100)
        num_before = len(cast.answers())
        server.process.send_signal(signal.SIGSTOP)
        num_at_stop = len(cast.answers())
        threading.Event().wait(STOPPED_S)  # the fault itself, and no wait for anything
        assert psutil.Process(server.process.pid).status() == psutil.STATUS_STOPPED
        assert len(cast.answers()) - num_at_stop <= 2 * len(cast.actors)
        server.process.send_signal(signal.SIGCONT)
        print(f"stopped for {STOPPED_S} s, resumed after {wait_for_answers(cast, 1):.1f} s")
        wait_for_answers(cast, 100)
        assert len(cast.answers()) > num_before
        books_of(cast, client)


def test_a_cut_network_delivers_late_and_nothing_counts_twice(tmp_path: Path, server: Server, run_id: str) -> None:
    """The link is cut for longer than a lease and than a client's patience with one request, and mended."""
    with connect(server.secret_url) as client, Proxy(server.port) as proxy:
        cast = make_cast(tmp_path, server, run_id, url=f"redis://127.0.0.1:{proxy.port}/0", lease_ttl_s=2.0)
        with playing(cast):
            wait_for_answers(cast, 100)
            onlooker = views_of(cast, client)
            wait_until(lambda: cuts_off_a_lease(proxy, onlooker, cast), "an actor that plays a group is cut off")
            wait_until(lambda: sweeps_away_a_lease(onlooker), "a lease is missed by somebody who is not cut off")
            proxy.mend()
            wait_for_answers(cast, 100)
            assert books_of(cast, client).ledger.expired_leases > 0


def cuts_off_a_lease(proxy: Proxy, onlooker: Views, cast: Cast) -> bool:
    """Cut the link; mend it if no group was being played, as then no lease could be missed."""
    proxy.cut_off()
    num_held = proxy.num_held
    wait_until(
        lambda: proxy.num_held >= num_held + 2 * len(cast.everyone), "everyone gave up on a request and tried again"
    )
    if not (is_cut_off := onlooker.learner.ledger().leased > 0 or sweeps_away_a_lease(onlooker)):
        proxy.mend()
    return is_cut_off


def sweeps_away_a_lease(onlooker: Views) -> bool:
    onlooker.actor.heartbeat("onlooker", [])
    return onlooker.learner.ledger().expired_leases > 0


# --- Two learners.


def stop_without_its_file(learner: Child, steps: Path) -> None:
    """Stop it while it does not hold its file, for which the next learner would wait forever."""
    with steps.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        learner.send(signal.SIGSTOP)
        os.waitid(os.P_PID, learner.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_new_learner_fences_the_old_out_and_trains_nothing_twice(tmp_path: Path, server: Server, run_id: str) -> None:
    with connect(server.secret_url) as client, playing(make_cast(tmp_path, server, run_id)) as cast:
        wait_for_answers(cast, 100)
        first = cast.learner
        stop_without_its_file(first, tmp_path / "cast" / "learner.jsonl")
        try:
            cast.learner = cast.stand_in("learner-2")
            cast.learner.start()
            wait_for_answers(cast, 200)
            first.send(signal.SIGCONT)
            wait_until(lambda: first.exit_code is not None, "the first learner is fenced out")
        finally:
            first.kill()
        assert first.exit_code == 1 and "FENCEDOUT by epoch" in first.last_log_lines()
        wait_for_answers(cast, 100)
        books_of(cast, client)
