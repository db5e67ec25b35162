"""`slipstream serve envs` as a real process, and requests to it over HTTP."""

import asyncio
import json
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import Env
from slipstream.envhub.remote.env_client import EnvClient
from tests.processes import Process
from tests.waiting import wait_until

UNRULY = "tests.envhub.unruly:UnrulyEnv"
TASK = Task(env="any", split="train", index=3)


class EnvHost:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.url = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=30) as reply:
            health = json.load(reply)
        assert isinstance(health, dict)
        return health

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def most_held_bytes(self) -> int:
        """The most that the server and its workers ever held, added up."""
        pids = [self.process.pid, *(worker.pid for worker in self.workers())]
        statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return sum(int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10 for status in statuses)

    def wait_until(self, holds: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Until its health is such."""
        wait_until(lambda: holds(self.health()), what)


@contextmanager
def stub_server(module: str, folder: Path) -> Iterator[str]:
    """The URL of `python -m module`, a server as strict as theirs; it must have raised nothing by the end."""
    process = Process("stub", [sys.executable, "-m", module], log=folder / "log", environment={})
    found = wait_until(lambda: re.search(r"port (\d+)\n", process.said()), "the stub")
    assert found is not None
    yield f"http://127.0.0.1:{found[1]}"
    process.kill()
    assert "Traceback" not in process.said(), process.said()


def env_process(folder: Path, *settings: str, **environment: str) -> Process:
    command = [sys.executable, "-m", "slipstream.tools.cli.cli", "serve", "envs", *settings]
    return Process("envs", command, log=folder / f"envs-{time.monotonic_ns()}.log", environment=environment)


@contextmanager
def env_host(folder: Path, *settings: str, port: int = 0) -> Iterator[EnvHost]:
    """A server that is up. It is killed behind this, and its workers with it."""
    host = EnvHost(env_process(folder, *settings, f"--port={port}"))
    try:

        def is_up() -> bool:
            assert host.process.exit_code is None, host.process.last_words()
            found = re.search(r"serving .* at (\S+)", host.process.said())
            host.url = found[1] if found else ""
            return bool(found)

        wait_until(is_up, "the environment server")
        yield host
    finally:
        if host.process.exit_code is None:
            workers = host.workers()
            host.process.kill()
            psutil.wait_procs(workers, timeout=30)
        assert "Traceback" not in host.process.said(), host.process.said()


def far(url: str, env: str, **options: Any) -> EnvClient:
    return EnvClient(url=url, env=env, options=options)


def play_and_close(env: Env, play: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def played() -> Any:
        try:
            return await play()
        finally:
            await env.close()

    return asyncio.run(played())
