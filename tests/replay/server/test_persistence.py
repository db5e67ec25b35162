"""What each way of keeping Redis's data loses when its process is killed, and when its host loses power.

Killed is killed: what was written is in the kernel's memory, and survives. Power loss is a model: the server is started
from its file cut at what must have been on disk. That is, of a file written with `appendfsync`
    always    what it held when the last insert was answered, since each answer waits for the disk,
    everysec  what it held a second before the end, since a background thread syncs it once a second,
    no        nothing: the kernel writes it out when it likes, by default after 30 s;
and a snapshot is on disk before it gets its name.
"""

import shutil
import time
from pathlib import Path

import pytest

from slipstream.common.process.connection import connect
from slipstream.tools.lab.loopback_server import start_server
from tests.replay.records.attempts import Views, leased, make_buffer, ticket
from tests.stand_ins import aof_of

WRITING_S = 2.5
NUM_AHEAD = 50


def insert_for_a_while(buffer: Views, file: Path) -> list[tuple[float, int]]:
    """When each insert was answered, and how long the file was then."""
    buffer.learner.acquire_epoch()
    written, until = list[tuple[float, int]](), time.monotonic() + WRITING_S
    while time.monotonic() < until:
        first = len(written)
        if first % NUM_AHEAD == 0:
            buffer.learner.open([ticket(group_id, num_members=1) for group_id in range(first, first + NUM_AHEAD)])
        buffer.insert(leased(buffer), 0)
        written.append((time.monotonic(), file.stat().st_size if file.exists() else 0))
    return written


def num_kept(directory: Path, run_id: str) -> int:
    """How many inserts the server finds when it is started again; everything that it finds is whole."""
    with start_server(directory) as server, connect(server.secret_url) as client:
        buffer = make_buffer(client, run_id)
        assert buffer.audit() == []
        return buffer.ledger.inserted


@pytest.mark.parametrize(
    ("settings", "synced_before_s"),
    [
        ("appendfsync always\n", 0.0),
        ("appendfsync everysec\n", 1.0),
        pytest.param("appendfsync no\n", float("inf"), marks=pytest.mark.long),
        pytest.param("appendonly no\nsave 1 1\n", None, marks=pytest.mark.long),
    ],
    ids=["AOF always", "AOF everysec", "AOF no", "RDB every second"],
)
def test_what_is_lost_when_the_server_is_killed_and_when_the_power_fails(
    settings: str, synced_before_s: float | None, tmp_path: Path, run_id: str
) -> None:
    directory = tmp_path / "redis"
    start_server(directory).stop()
    (directory / "appendonly.aof").unlink(missing_ok=True)
    shutil.rmtree(directory / "appendonlydir", ignore_errors=True)
    config = directory / "redis.conf"
    config.write_text(config.read_text() + settings)  # the last of two settings holds, at later starts too
    server, file = start_server(directory), aof_of(directory)
    with connect(server.secret_url) as client:
        written = insert_for_a_while(make_buffer(client, run_id), file)
        server.process.kill()
        server.process.wait()
    num_written = len(written)
    per_s = num_written / WRITING_S
    whole = file.read_bytes() if synced_before_s is not None else b""
    lost_without_power = lost_when_killed = num_written - num_kept(directory, run_id)
    if synced_before_s is not None:
        synced_bytes = [0, *(size for at_s, size in written if at_s <= written[-1][0] - synced_before_s)][-1]
        file.write_bytes(whole[:synced_bytes])
        lost_without_power = num_written - num_kept(directory, run_id)
    print(
        f"{per_s:.0f} inserts/s, {num_written} answered; lost {lost_when_killed} when killed, "
        f"{lost_without_power} without power: the last {lost_without_power / per_s:.2f} s"
    )
    assert num_written > 10
    match synced_before_s:
        case None:
            assert 0 < lost_when_killed <= num_written
        case 0.0:
            assert (lost_when_killed, lost_without_power) == (0, 0)
        case 1.0:
            # What is written while a sync is under way waits in the server, for 2 s at most.
            assert lost_when_killed < num_written and 0 < lost_without_power < num_written
        case _:
            assert lost_when_killed == 0 and lost_without_power == num_written
