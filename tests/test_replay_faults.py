"""Processes killed and stopped, servers killed, stopped and full; each test sees that its fault did fire.

The processes are the stand-ins of `make soak`, whose journals have the answers to their inserts.
"""

import contextlib
import os
import random
import resource
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from common.connection import connect
from common.trajectory import Trajectory
from common.weights import Manifest, Offer
from replay.actor_buffer import ORPHAN_TTL_S
from replay.bulletin import Bulletin
from replay.keys import FencedOut, key
from replay.ledger import read_ledger
from replay.server import Server, find_executable, start_server
from replay.ticket import InsertResult, Lease
from tests.attempts import Views, attempt_at, make_buffer, ticket
from tests.proxy import Fault, Nth, Proxy, Share
from tools.soak.accounts import Accounts
from tools.soak.actor import VOCAB_SIZE, Work, replay_of
from tools.soak.cast import Cast

NUM_REDIS_KILLS = int(os.environ.get("SLIPSTREAM_REDIS_KILLS", "3"))
STOPPED_S = float(os.environ.get("SLIPSTREAM_STOPPED_S", "8"))
NUM_CUTS = int(os.environ.get("SLIPSTREAM_AOF_CUTS", "12"))
DEADLINE_S = 120.0
POLL_S = 0.02
RESUMED_S = 30.0  # 5 s on a machine that has nothing else to do; the measured time is printed


@contextlib.contextmanager
def playing(cast: Cast) -> Iterator[Cast]:
    """The cast, started; whoever still runs in the end is killed."""
    try:
        cast.start()
        yield cast
    finally:
        cast.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own, to be hurt."""
    with start_server(tmp_path / "redis") as server:
        yield server


def make_cast(tmp_path: Path, server: Server, run_id: str, *, url: str = "", **work: float) -> Cast:
    settings = Work(url=url or server.url, run_id=run_id, **work)  # type: ignore[arg-type]
    return Cast(tmp_path / "cast", settings, password=server.password)


def wait_until(condition: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S) -> float:
    """Seconds until `condition()` held."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < deadline_s, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(POLL_S)
    return time.monotonic() - started


def wait_for_answers(cast: Cast, num_more: int) -> float:
    """Seconds until the actors had that many more answers to their inserts, and each of them one."""
    before = {journal: len(journal.read_bytes()) for journal in cast.journals}
    num_before = len(cast.answers())

    def all_go_on() -> bool:
        is_growing = [len(journal.read_bytes()) > before.get(journal, 0) for journal in cast.journals]
        return len(is_growing) == len(cast.actors) and all(is_growing) and len(cast.answers()) >= num_before + num_more

    return wait_until(all_go_on, f"{num_more} more answers")


def books_of(cast: Cast, client: redis.Redis) -> Accounts:
    """End all processes in order and compare; none may have ended before."""
    assert cast.end() == []
    accounts = cast.accounts(client)
    assert accounts.hold, accounts
    assert accounts.num_acknowledged > 0 and accounts.num_trained > 0
    return accounts


def blobs(client: redis.Redis, run_id: str) -> list[bytes]:
    return list(client.scan_iter(f"{key(run_id, 'train', 'blob')}:*"))


# --- An actor is killed in mid-insert.


class AtCommit:
    """The fault strikes the script that follows the first payload: the commit of an insert."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._payload_seen = False
        self._is_spent = False

    def __call__(self, request: list[bytes]) -> Fault:
        if request[0].upper() == b"SET":
            self._payload_seen = True
        elif self._payload_seen and not self._is_spent:
            self._is_spent = True
            return self._fault
        return Fault.NONE


@pytest.mark.parametrize(
    ("judge", "witness", "num_blobs", "num_inserted"),
    [
        (Nth(Fault.SWALLOW, only=b"SET"), Fault.SWALLOW, 0, 0),
        (AtCommit(Fault.SWALLOW), Fault.SWALLOW, 1, 0),
        (AtCommit(Fault.WITHHOLD_REPLY), Fault.WITHHOLD_REPLY, 1, 1),
    ],
    ids=["before the payload", "between payload and commit", "after the commit, before the reply"],
)
def test_an_actor_killed_in_an_insert_leaves_it_whole_or_not_at_all(
    judge: Callable[[list[bytes]], Fault], witness: Fault, num_blobs: int, num_inserted: int,
    tmp_path: Path, server: Server, run_id: str,
) -> None:  # fmt: skip
    with connect(server.secret_url) as client, Proxy(("127.0.0.1", server.port)) as proxy:
        cast = make_cast(tmp_path, server, run_id, url=f"redis://127.0.0.1:{proxy.port}/0", lease_ttl_s=1.0)
        know_the_scripts(client)
        buffer = views_of(cast, client)
        buffer.learner.acquire_epoch()
        buffer.learner.open([ticket(0, num_members=2)])
        proxy.judge = judge
        victim = cast.stand_in("actor-victim")
        victim.start()
        wait_until(lambda: proxy.done[witness] == 1, "the insert is held where it is")
        victim.send(signal.SIGKILL)
        victim.wait(DEADLINE_S)
        assert victim.exit_code == -signal.SIGKILL
        assert cast.answers() == []

        assert len(blobs(client, run_id)) == num_blobs
        assert buffer.learner.ledger().inserted == num_inserted and buffer.audit() == []
        orphans = [blob for blob in blobs(client, run_id) if client.ttl(blob) >= 0]
        assert len(orphans) == num_blobs - num_inserted
        assert all(0 < client.ttl(orphan) <= ORPHAN_TTL_S for orphan in orphans)
        assert buffer.learner.claim(1, 1, policy_version=0, max_lag=0) == []

        heir = await_lease(buffer)
        assert len(heir.missing) == 2 - num_inserted
        for member in heir.missing:
            assert buffer.actor.insert(heir, attempt_at(heir, member, run_id=run_id)) is InsertResult.STORED
        (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
        assert [t.member for t in group.trajectories] == [0, 1]
        assert buffer.learner.settle(1) == 1
        for orphan in orphans:
            assert client.pexpire(orphan, 1)
        wait_until(lambda: not blobs(client, run_id), "no payload is left")
        ledger = buffer.learner.ledger()
        assert (ledger.trained, ledger.inserted, ledger.trained_trajectories) == (1, 2, 2)
        assert ledger.balanced and buffer.audit() == []


def views_of(cast: Cast, client: redis.Redis) -> Views:
    """The buffer of the processes of a soak."""
    return Views(client, cast.work.run_id, replay_of(cast.work), vocab_size=VOCAB_SIZE)


def know_the_scripts(client: redis.Redis) -> None:
    """Insert once in a run of no interest, so that a commit is one request from then on."""
    buffer = make_buffer(client, "no interest")
    buffer.learner.acquire_epoch()
    buffer.learner.open([ticket(0)])
    lease = await_lease(buffer)
    assert buffer.actor.insert(lease, attempt_at(lease, 0, run_id="no interest")) is InsertResult.STORED


def await_lease(buffer: Views) -> Lease:
    """The lease of whoever was killed, once it has expired."""
    found: list[Lease] = []

    def is_leased() -> bool:
        lease = buffer.actor.lease("heir")
        found.extend([lease] if lease else [])
        return bool(found)

    wait_until(is_leased, "the lease expires")
    return found[0]


# --- The server is killed, stopped, cut off, or loads.


def test_no_acknowledged_insert_is_lost_however_often_the_server_is_killed_under_load(
    tmp_path: Path, run_id: str
) -> None:
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


def test_a_server_that_loads_its_file_is_waited_for(tmp_path: Path, run_id: str) -> None:
    directory = tmp_path / "redis"
    server = start_server(directory)
    with connect(server.secret_url) as client:
        buffer = make_buffer(client, run_id)
        buffer.learner.acquire_epoch()
        buffer.learner.open([ticket(group_id) for group_id in range(1500)])
        for number in range(3000):
            client.set(f"ballast:{number}", number)
        server.stop()
        with (directory / "redis.conf").open("a") as config:
            config.write("key-load-delay 500\n")  # microseconds, so that it takes seconds

        replies: list[str] = []
        leases: list[Lease | None] = []
        watcher = threading.Thread(target=record_replies, args=(server.secret_url, replies))
        actor = threading.Thread(target=lambda: leases.append(buffer.actor.lease("a")))
        for thread in (watcher, actor):
            thread.start()
        with start_server(directory):
            watcher.join(DEADLINE_S)
            actor.join(DEADLINE_S)
            assert any(reply.startswith("Redis is loading") for reply in replies), set(replies)
            assert leases[0] is not None and leases[0].ticket.group_id == 0
            assert buffer.learner.ledger().queued == 1499 and buffer.audit() == []


def record_replies(url: str, replies: list[str]) -> None:
    """What the server says to each ping, until it says PONG."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            with redis.Redis.from_url(url, retry=None, protocol=2) as client:
                client.ping()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            replies.append(str(error))
        else:
            return


def test_a_server_that_stands_still_stops_nobody_for_good(tmp_path: Path, server: Server, run_id: str) -> None:
    with connect(server.secret_url) as client, playing(make_cast(tmp_path, server, run_id)) as cast:
        wait_for_answers(cast, 100)
        num_before = len(cast.answers())
        server.process.send_signal(signal.SIGSTOP)
        num_at_stop = len(cast.answers())
        threading.Event().wait(STOPPED_S)  # the fault itself, and no wait for anything
        assert is_stopped(server.process.pid)
        assert len(cast.answers()) - num_at_stop <= 2 * len(cast.actors)
        server.process.send_signal(signal.SIGCONT)
        print(f"stopped for {STOPPED_S} s, resumed after {wait_for_answers(cast, 1):.1f} s")
        wait_for_answers(cast, 100)
        assert len(cast.answers()) > num_before
        books_of(cast, client)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_cut_network_delivers_late_and_nothing_counts_twice(tmp_path: Path, server: Server, run_id: str) -> None:
    """The link is cut for longer than a lease and than a client's patience with one request, and mended."""
    with connect(server.secret_url) as client, Proxy(("127.0.0.1", server.port)) as proxy:
        cast = make_cast(tmp_path, server, run_id, url=f"redis://127.0.0.1:{proxy.port}/0", lease_ttl_s=2.0)
        with playing(cast):
            wait_for_answers(cast, 100)
            proxy.cut_off()
            wait_until(
                lambda: proxy.num_held >= 2 * len(cast.everyone), "everyone gave up on a request and tried again"
            )
            onlooker = views_of(cast, client)
            wait_until(lambda: sweeps_away_a_lease(onlooker), "a lease is missed by somebody who is not cut off")
            proxy.mend()
            wait_for_answers(cast, 100)
            accounts = books_of(cast, client)
            assert accounts.ledger.expired_leases > 0


def sweeps_away_a_lease(onlooker: Views) -> bool:
    onlooker.actor.heartbeat("onlooker", [])
    return onlooker.learner.ledger().expired_leases > 0


def test_everything_is_counted_once_when_a_tenth_of_all_requests_arrive_twice(
    tmp_path: Path, server: Server, run_id: str
) -> None:
    """Half of them at once, half of them behind later requests; and the learner comes back from older checkpoints."""
    with connect(server.secret_url) as client, Proxy(("127.0.0.1", server.port)) as proxy:
        proxy.judge = Share(0.1, Fault.DUPLICATE, Fault.DUPLICATE_LATE, seed=1)
        with playing(make_cast(tmp_path, server, run_id, url=f"redis://127.0.0.1:{proxy.port}/0")) as cast:
            for _ in range(3):
                wait_for_answers(cast, 250)
                cast.learner.kill()
                cast.learner.start()
            wait_for_answers(cast, 250)
            accounts = books_of(cast, client)
        num_twice = proxy.done[Fault.DUPLICATE] + proxy.done[Fault.DUPLICATE_LATE]
        print(f"{num_twice} of {proxy.done.total()} requests arrived twice; {accounts.ledger}")
        assert proxy.done[Fault.DUPLICATE] > 100 and proxy.done[Fault.DUPLICATE_LATE] > 100
        assert num_twice > 0.07 * proxy.done.total()
        assert accounts.ledger.dedup_hits > 0


# --- The server loses power: its file ends anywhere.


def test_a_file_that_ends_anywhere_loads_and_holds_no_half_of_anything(tmp_path: Path, run_id: str) -> None:
    """Power loss, modelled: what was not on disk yet is cut off, at any byte. Writes are in the order of execution."""
    source = tmp_path / "redis"
    with (
        start_server(source) as server,
        connect(server.secret_url) as client,
        playing(make_cast(tmp_path, server, run_id)) as cast,
    ):
        wait_for_answers(cast, 300)
        cast.learner.kill()
        cast.learner.start()
        wait_for_answers(cast, 100)
        whole = books_of(cast, client)
    file = (source / "appendonly.aof").read_bytes()
    chance = random.Random(7)
    inserted, num_truncated = [], 0
    for number in range(NUM_CUTS):
        directory = tmp_path / f"cut-{number}"
        shutil.copytree(source, directory, ignore=shutil.ignore_patterns("redis.log", "redis.lock"))
        cut = chance.randrange(len(file) // 3, len(file))
        (directory / "appendonly.aof").write_bytes(file[:cut])
        with start_server(directory) as server, connect(server.secret_url) as client:
            buffer = views_of(cast, client)
            assert buffer.audit() == [], f"cut at byte {cut}"
            inserted.append(buffer.learner.ledger().inserted)
            buffer.learner.acquire_epoch()
            num_ready = buffer.learner.ledger().ready
            if num_ready:  # and every payload of what is ready is there
                assert len(buffer.learner.claim(10_000, num_ready, policy_version=0, max_lag=0)) == num_ready
        num_truncated += "AOF loaded anyway because aof-load-truncated is enabled" in log_of(directory)
    assert num_truncated > NUM_CUTS // 2  # the others happened to end with a whole command
    assert max(inserted) <= whole.ledger.inserted and min(inserted) < whole.ledger.inserted


@pytest.mark.parametrize("place", range(NUM_CUTS))
def test_a_run_that_goes_on_after_its_file_was_cut_has_right_books_after_the_next_start_too(
    place: int, tmp_path: Path, run_id: str
) -> None:
    """The cut is inside a transaction: what Redis leaves of it must not be taken for the beginning of another."""
    directory = tmp_path / "redis"
    with start_server(directory) as server, connect(server.secret_url) as client:
        play_some(make_buffer(client, run_id), run_id, first_group_id=0)
    file = directory / "appendonly.aof"
    whole = file.read_bytes()
    start, stop = whole.rfind(b"MULTI", 0, whole.rfind(b"MULTI")), whole.rfind(b"EXEC")
    file.write_bytes(whole[: start + (stop - start) * (place + 1) // (NUM_CUTS + 1)])
    server = start_server(directory)
    with connect(server.secret_url) as client:
        buffer = make_buffer(client, run_id)
        assert buffer.audit() == []
        play_some(buffer, run_id, first_group_id=10)
        assert buffer.audit() == []
        ledger = buffer.learner.ledger()
        server.process.kill()
        server.process.wait()
        with start_server(directory):
            assert buffer.audit() == [] and buffer.learner.ledger() == ledger and ledger.repairs == 0


def play_some(buffer: Views, run_id: str, *, first_group_id: int) -> None:
    """Three groups: trained, ready, leased."""
    buffer.learner.acquire_epoch()
    buffer.learner.open([ticket(group_id) for group_id in range(first_group_id, first_group_id + 3)])
    for num_members in (2, 2, 1):
        lease = await_lease(buffer)
        for member in list(lease.missing)[:num_members]:
            buffer.actor.insert(lease, attempt_at(lease, member, run_id=run_id))
        if num_members == 2 and buffer.learner.ledger().trained < 1:
            buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
            buffer.learner.settle(1)


def log_of(directory: Path) -> str:
    return (directory / "redis.log").read_text()


def test_a_missing_payload_drops_its_group_and_is_logged(tmp_path: Path, server: Server, run_id: str) -> None:
    """Slipstream removes no payload of a live group; if something else did, the learner continues without the group."""
    with connect(server.secret_url) as client:
        buffer = make_buffer(client, run_id)
        buffer.learner.acquire_epoch()
        buffer.learner.open([ticket(0), ticket(1)])
        for _ in range(2):
            lease = buffer.actor.lease("a")
            assert lease is not None
            for member in lease.missing:
                buffer.actor.insert(lease, attempt_at(lease, member, run_id=run_id))
        assert client.delete(next(client.scan_iter(f"{key(run_id, 'train', 'blob', 0)}:*"))) == 1
        assert [group.ticket.group_id for group in buffer.learner.claim(1, 2, policy_version=0, max_lag=0)] == [1]
        assert buffer.learner.ledger().dropped == {"lost_payload": 1} and buffer.audit() == []


# --- The server has no room.


def test_a_full_memory_makes_actors_wait_until_the_learner_has_drained_it(
    tmp_path: Path, server: Server, run_id: str
) -> None:
    cast = make_cast(tmp_path, server, run_id, num_tokens=12_000, checkpoint_every=1)
    with connect(server.admin_url) as client, playing(cast):
        wait_for_answers(cast, 30)
        cast.learner.send(signal.SIGSTOP)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
        wait_until(lambda: num_full(cast) > 4, "actors hear that there is no room")
        num_stored = len(cast.answers()) - num_full(cast)
        assert read_ledger(client, run_id).balanced
        assert all(child.exit_code is None for child in cast.everyone)
        cast.learner.send(signal.SIGCONT)
        wait_until(lambda: len(cast.answers()) - num_full(cast) > num_stored + 50, "the buffer drains and fills again")
        accounts = books_of(cast, client)
        print(f"{accounts.num_full} inserts found no room")
        assert accounts.num_full > 4


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
        file = server.directory / "appendonly.aof"
        limit = file.stat().st_size + 20_000
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        wait_until(lambda: client.info("persistence")["aof_last_write_status"] == "err", "the server's disk is full")
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            no_patience(server).set("anything", 1)
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
        assert inserted and inserted[0] in (
            InsertResult.STORED,
            InsertResult.FENCED,
        )  # it may have lost its lease since
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
        buffer = make_buffer(client, run_id)
        buffer.learner.acquire_epoch()
        buffer.learner.open([ticket(group_id, num_members=1) for group_id in range(500)])
        limit = (server.directory / "appendonly.aof").stat().st_size + 200_000
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        num_stored = 0
        with connect(server.secret_url, patience_s=0.5) as impatient:
            actor = make_buffer(impatient, run_id)
            with pytest.raises(redis.ConnectionError):
                while True:
                    lease = await_lease(actor)
                    assert actor.actor.insert(lease, attempt_at(lease, 0, run_id=run_id)) is InsertResult.STORED
                    num_stored += 1
        assert server.process.wait(DEADLINE_S) == 1
        assert "Can't recover from AOF write error when the AOF fsync policy is 'always'" in log_of(server.directory)
        with start_server(server.directory):
            assert num_stored > 10 and buffer.learner.ledger().inserted >= num_stored
            assert buffer.audit() == []


def server_that_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """One whose write fails past RLIMIT_FSIZE, with EFBIG for ENOSPC; by default the kernel would kill it."""
    executable = find_executable()
    wrapper = tmp_path / "bin" / "redis-server"
    wrapper.parent.mkdir()
    wrapper.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec {executable} \"$@\"\n")
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    return start_server(tmp_path / "redis")


def no_patience(server: Server) -> redis.Redis:
    return redis.Redis.from_url(server.secret_url, retry=None, protocol=2)


# --- Two learners.


def test_a_second_learner_fences_the_first_out_and_nothing_is_trained_twice(
    tmp_path: Path, server: Server, run_id: str
) -> None:
    with connect(server.secret_url) as client, playing(make_cast(tmp_path, server, run_id)) as cast:
        wait_for_answers(cast, 100)
        first = cast.learner
        first.send(signal.SIGSTOP)
        try:
            cast.learner = cast.stand_in("learner-2")
            cast.learner.start()
            wait_for_answers(cast, 200)
            first.send(signal.SIGCONT)
            wait_until(lambda: first.exit_code is not None, "the first learner is fenced out")
        finally:
            first.kill()
        assert first.exit_code == 1 and "FENCEDOUT by epoch 2" in first.last_log_lines()
        wait_for_answers(cast, 100)
        books_of(cast, client)


def test_an_older_learner_can_neither_use_a_verb_nor_publish(redis_client: redis.Redis, run_id: str) -> None:
    older, newer = make_buffer(redis_client, run_id), make_buffer(redis_client, run_id)
    bulletin = Bulletin(redis_client, run_id)
    older.learner.acquire_epoch()
    older.learner.open([ticket(0)])
    bulletin.announce(an_offer(learner_epoch=1, policy_version=1))
    newer.learner.acquire_epoch()
    verbs: list[Callable[[], object]] = [
        lambda: older.learner.open([ticket(1)]),
        lambda: older.learner.claim(1, 1, policy_version=0, max_lag=0),
        lambda: older.learner.drop([0], "why"),
        lambda: older.learner.settle(1),
        lambda: older.learner.reopen(0),
        lambda: bulletin.announce(an_offer(learner_epoch=1, policy_version=2)),
    ]
    for verb in verbs:
        with pytest.raises(FencedOut):
            verb()
    assert newer.learner.ledger().opened == 1 and newer.learner.ledger().queued == 1 and newer.audit() == []
    latest = bulletin.latest()
    assert latest is not None and latest.manifest.policy_version == 1


def an_offer(*, learner_epoch: int, policy_version: int) -> Offer:
    manifest = Manifest(
        policy_version=policy_version,
        learner_epoch=learner_epoch,
        tensors=[],
        num_bytes=0,
        root=f"root of {policy_version}",
        adapted=None,
        anchor=None,
        deltas=[],
    )
    return Offer(manifest=manifest, pull_endpoint="tcp://127.0.0.1:1")
