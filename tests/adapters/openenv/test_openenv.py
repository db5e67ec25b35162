"""Our client plays on a server of OpenEnv's own package. `make test-adapters-openenv`.

The package lies in an environment of its own, OPENENV_PYTHON, and this process has none of it.
"""

import asyncio
import json
import os
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import EnvError
from tests.processes import Process
from tests.waiting import wait_until

HERE = Path(__file__).parent
PYTHON = os.environ["OPENENV_PYTHON"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that their library runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("openenv") / "log"
    process = Process("theirs", [PYTHON, str(HERE / "their_server.py"), str(port)], log=log, environment={})

    def is_up() -> bool:
        assert process.exit_code is None, process.last_words()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    wait_until(is_up, "OpenEnv's server, which imports much")
    yield f"http://127.0.0.1:{port}"
    process.kill()


async def test_our_client_plays_a_server_of_theirs(theirs: str) -> None:
    env = make_env("openenv", {"url": theirs, "observation_field": "text"})
    start = await env.reset(Task(env="openenv", split="train", index=1))
    first = int(start.messages[0].content.removeprefix("count down from "))
    assert (await env.step("99")).messages[0].content == "not 99"
    turns = [await env.step(str(number)) for number in range(first, 0, -1)]
    assert [turn.rewards["openenv"] for turn in turns] == [pytest.approx(1 / first)] * first
    assert turns[-1].terminated and turns[-1].success
    with pytest.raises(EnvError, match="is over; call reset first"):
        await env.step("1")
    assert await env.reset(Task(env="openenv", split="train", index=1)) == start
    with pytest.raises(EnvError, match="reported EXECUTION_ERROR: the database is gone"):
        await env.step("break")
    await env.close()


async def test_our_client_waits_for_a_session_of_theirs_and_names_a_wrong_field(theirs: str) -> None:
    one, two, three = (make_env("openenv", {"url": theirs, "action_field": "text"}) for _ in range(3))
    task = Task(env="openenv", split="held_out", index=0)
    await one.reset(task)
    await two.reset(task)
    start = asyncio.create_task(three.reset(task))
    await asyncio.sleep(1.5)
    assert not start.done()  # theirs has two sessions
    with pytest.raises(EnvError, match=r"VALIDATION_ERROR: Invalid message .*missing.*message"):
        await one.step("4")
    assert json.loads((await start).messages[0].content)["text"].startswith("count down from ")
    for env in (one, two, three):
        await env.close()
