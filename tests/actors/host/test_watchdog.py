"""An actor whose event loop stands still ends by itself and says what blocks it, without any supervisor."""

import sys
from pathlib import Path

import redis

from slipstream.replay.server.redis_server import Server
from tests.actors.group.test_group import buffer_with
from tests.processes import Process

WATCHED = """
import asyncio, re
from slipstream.actors.host.watchdog import watch

async def step():
    watch(limit_s=1)
    await asyncio.sleep(0.1)
    {}

asyncio.run(step())
"""


def watched(work: str, folder: Path) -> tuple[int, str]:
    """The exit code of a process that does `work` under a watchdog of 1 s, and what it logged."""
    process = Process("watched", [sys.executable, "-c", WATCHED.format(work)], log=folder / "log", environment={})
    return process.wait(120), process.said()


def test_an_environment_that_blocks_ends_its_actor_which_names_it_and_its_group_goes_to_others(
    redis_server: Server, redis_client: redis.Redis, run_id: str, tmp_path: Path
) -> None:
    buffer = buffer_with(redis_client, run_id)
    command = [sys.executable, "-m", "tests.actors.blocked_actor", redis_server.secret_url, run_id]
    actor = Process("blocked", command, log=tmp_path / "blocked", environment={})
    assert actor.wait(120) == 1
    said = actor.said()
    assert "the event loop has been blocked for 3 s" in said
    assert "of group 0, environment 'shop' blocks it at " in said and "BlockingEnv.step: `time.sleep(3600)" in said
    assert buffer.actor.lease("heir") is not None and buffer.ledger.expired_leases == 1


def test_a_call_that_does_not_let_go_of_the_interpreter_ends_its_process_and_is_named(tmp_path: Path) -> None:
    """No other thread of Python's runs while such a call does, as one of a regular expression."""
    exit_code, said = watched('re.fullmatch("(a+)+", 40 * "a" + "b")', tmp_path)
    assert exit_code == 1 and "Timeout (0:00:02)!" in said and "fullmatch" in said


def test_a_loop_that_turns_is_left_alone(tmp_path: Path) -> None:
    assert watched("await asyncio.sleep(2.5)", tmp_path) == (0, "")
