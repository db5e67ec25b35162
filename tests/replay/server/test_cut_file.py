"""The server loses power: its file ends anywhere, and the books are right."""

import os
import random
import shutil
from pathlib import Path

import pytest

from slipstream.common.process.connection import connect
from slipstream.tools.lab.loopback_server import start_server
from tests.replay.records.attempts import Views, make_buffer, ticket
from tests.stand_ins import aof_of, await_lease, books_of, log_of, make_cast, playing, views_of, wait_for_answers

NUM_CUTS = int(os.environ.get("SLIPSTREAM_AOF_CUTS", "6"))


def test_a_file_that_ends_anywhere_loads_and_holds_no_half_of_anything(tmp_path: Path, run_id: str) -> None:
    """Power loss, modelled: what was not on disk yet is cut off, at any byte. Writes are in the order of execution."""
    source = tmp_path / "redis"
    with start_server(source) as server, playing(make_cast(tmp_path, server, run_id)) as cast:
        wait_for_answers(cast, 100)
        cast.learner.kill()
        cast.learner.start()
        wait_for_answers(cast, 50)
        with connect(server.secret_url) as client:
            whole = books_of(cast, client)
    file = aof_of(source).read_bytes()
    chance = random.Random(7)
    inserted, num_truncated = [], 0
    for number in range(NUM_CUTS):
        directory = tmp_path / f"cut-{number}"
        shutil.copytree(source, directory, ignore=shutil.ignore_patterns("redis.log", "redis.lock"))
        cut = chance.randrange(len(file) // 3, len(file))
        aof_of(directory).write_bytes(file[:cut])
        with start_server(directory) as server, connect(server.secret_url) as client:
            buffer = views_of(cast, client)
            assert buffer.audit() == [], f"cut at byte {cut}"
            inserted.append(buffer.ledger.inserted)
            buffer.learner.acquire_epoch()
            num_ready = buffer.ledger.ready
            if num_ready:  # and every payload of what is ready is there
                assert len(buffer.learner.claim(10_000, num_ready, policy_version=0, max_lag=0)) == num_ready
        num_truncated += "loaded anyway because aof-load-truncated is enabled" in log_of(directory)
    assert num_truncated > NUM_CUTS // 2  # the others happened to end with a whole command
    assert max(inserted) <= whole.ledger.inserted and min(inserted) < whole.ledger.inserted


@pytest.mark.parametrize("place", range(NUM_CUTS))
def test_a_run_that_goes_on_after_its_file_was_cut_has_right_books_after_the_next_start_too(
    place: int, tmp_path: Path, run_id: str
) -> None:
    """The cut is inside a transaction: what Redis leaves of it must not be taken for the beginning of another."""
    directory = tmp_path / "redis"
    with start_server(directory) as server, connect(server.secret_url) as client:
        play_some(make_buffer(client, run_id), first_group_id=0)
    file = aof_of(directory)
    whole = file.read_bytes()
    start, stop = whole.rfind(b"MULTI", 0, whole.rfind(b"MULTI")), whole.rfind(b"EXEC")
    file.write_bytes(whole[: start + (stop - start) * (place + 1) // (NUM_CUTS + 1)])
    server = start_server(directory)
    with connect(server.secret_url) as client:
        buffer = make_buffer(client, run_id)
        assert buffer.audit() == []
        play_some(buffer, first_group_id=10)
        assert buffer.audit() == []
        ledger = buffer.ledger
        server.process.kill()
        server.process.wait()
        with start_server(directory):
            assert buffer.audit() == [] and buffer.ledger == ledger and ledger.repairs == 0


def play_some(buffer: Views, *, first_group_id: int) -> None:
    """Three groups: trained, ready, leased."""
    buffer.start(*(ticket(group_id) for group_id in range(first_group_id, first_group_id + 3)))
    for num_members in (2, 2, 1):
        lease = await_lease(buffer)
        buffer.insert(lease, *list(lease.missing)[:num_members])
        if num_members == 2 and buffer.ledger.trained < 1:
            buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
            buffer.learner.settle(1)
