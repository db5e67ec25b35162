"""A cast of stand-ins for learner and actors, on a server that a test may hurt."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from slipstream.replay.records.ticket import Lease
from slipstream.tools.lab.loopback_server import Server, start_server
from slipstream.tools.lab.soak.accounts import Accounts
from slipstream.tools.lab.soak.actor import VOCAB_SIZE, Work, replay_of
from slipstream.tools.lab.soak.cast import Cast
from tests.replay.records.attempts import Views
from tests.waiting import wait_until


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


def wait_for_answers(cast: Cast, num_more: int) -> float:
    """Seconds until the actors had that many more answers to their inserts, and each of them one."""
    started, before = time.monotonic(), {journal: len(journal.read_bytes()) for journal in cast.journals}
    num_before = len(cast.answers())

    def all_go_on() -> bool:
        is_growing = [len(journal.read_bytes()) > before.get(journal, 0) for journal in cast.journals]
        return len(is_growing) == len(cast.actors) and all(is_growing) and len(cast.answers()) >= num_before + num_more

    wait_until(all_go_on, f"{num_more} more answers")
    return time.monotonic() - started


def books_of(cast: Cast, client: redis.Redis) -> Accounts:
    """End all processes in order and compare; none may have ended before."""
    assert cast.end() == []
    accounts = cast.accounts(client)
    assert accounts.hold, accounts
    assert accounts.num_acknowledged > 0 and accounts.num_trained > 0
    return accounts


def views_of(cast: Cast, client: redis.Redis) -> Views:
    """The buffer of these processes."""
    return Views(client, cast.work.run_id, replay_of(cast.work), vocab_size=VOCAB_SIZE)


def await_lease(buffer: Views) -> Lease:
    """The lease of whoever was killed, once it has expired."""
    found: list[Lease] = []

    def is_leased() -> bool:
        lease = buffer.actor.lease("heir")
        found.extend([lease] if lease else [])
        return bool(found)

    wait_until(is_leased, "the lease expires")
    return found[0]


def log_of(directory: Path) -> str:
    return (directory / "redis.log").read_text()


def aof_of(directory: Path) -> Path:
    """The file that the server in `directory` appends to: from Redis 7 on, and of Valkey, it lies in a folder."""
    return max(directory.glob("appendonlydir/*.incr.aof"), default=directory / "appendonly.aof")
