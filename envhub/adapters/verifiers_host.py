"""The process of `verifiers` and its endpoint for tokens, shared by the episodes of one configuration.

Importing verifiers takes seconds, so the process runs as long as any episode uses it. It uses the user's Python,
because its pinned packages conflict with ours. It inherits only the variables that a program needs, and no secrets.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.trajectory import Sampling, Task
from slipstream.envhub.adapters.generate_server import GenerateServer
from slipstream.envhub.adapters.verifiers_session import EpisodeReport, Session
from slipstream.envhub.env import EnvError
from slipstream.envhub.name_list import name_list

DRIVER = Path(__file__).with_name("verifiers_driver.py")
MAX_LINE_BYTES = 64 << 20  # of the report on an episode, with all its sampled tokens
END_S = 5.0  # time for the process to end its episodes
INHERITED = name_list(
    """
    PATH, HOME, USER, LANG, LC_ALL, TMPDIR, PYTHONPATH, XDG_CACHE_HOME, HF_HOME, HF_HUB_OFFLINE, SSL_CERT_FILE,
    SSL_CERT_DIR, OMP_NUM_THREADS, UV_CACHE_DIR, UV_OFFLINE
    """
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSettings:
    """The settings of a process; episodes with equal settings share it."""

    of_verifiers: str  # its config, held_out and renderer, as JSON
    python: str
    secrets: frozenset[tuple[str, str]]  # (variable there, variable of the actor)
    model_folder: str
    max_tokens: int
    max_turns: int
    end_tokens: frozenset[int]


class VerifiersHost:
    """One process, from the first episode that uses it to the last. Created, used and stopped in one event loop."""

    def __init__(self, settings: HostSettings) -> None:
        self.num_users = 0
        self._settings = settings
        self._sessions: dict[str, Session] = {}
        self._requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._running = asyncio.create_task(self._run(), context=Context())  # belongs to no episode: episodes share it

    @property
    def is_lost(self) -> bool:
        return self._running.done()

    def begin(self, task: Task, session: Session) -> str:
        """Start an episode, whose end goes to `session`. Return its name."""
        name = secrets.token_hex(16)
        self._sessions[name] = session
        request = {"run": name, "split": task.split, "index": task.index, "sampling": _sampling(session.sampling)}
        self._requests.put_nowait(request)
        return name

    def end(self, name: str) -> None:
        """Cancel an episode, unless it is over."""
        if self._sessions.pop(name, None) is not None:
            self._requests.put_nowait({"cancel": name})

    async def stop(self) -> None:
        """Ask the process to end its episodes and itself, and kill it after a timeout."""
        self._requests.put_nowait(None)
        try:
            await asyncio.wait({self._running}, timeout=END_S)
        finally:
            self._running.cancel()

    async def _run(self) -> None:
        why = "its process was stopped"
        try:
            secret, settings = secrets.token_urlsafe(), self._settings
            server = GenerateServer(
                self._sessions, max_tokens=settings.max_tokens, end_tokens=settings.end_tokens, secret=secret
            )
            first = json.loads(settings.of_verifiers) | {"secret": secret, "max_turns": settings.max_turns}
            async with server.listening() as url, self._process() as process:
                assert process.stdin is not None and process.stdout is not None
                first |= {"url": url, "model_folder": settings.model_folder}
                writing = asyncio.create_task(self._write(process.stdin, first))
                try:
                    why = await self._read_reports(process.stdout)
                finally:
                    writing.cancel()
        except (OSError, ValueError, *MALFORMED) as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            for session in self._sessions.values():
                session.fail(EnvError(f"verifiers cannot be used: {why}"))

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[Process]:
        # -P: some modules in the folder of the driver have names of the standard library.
        process = await asyncio.create_subprocess_exec(
            self._settings.python,
            "-P",
            str(DRIVER),
            stdin=PIPE,
            stdout=PIPE,
            limit=MAX_LINE_BYTES,
            env=_environment(self._settings),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _write(self, stdin: asyncio.StreamWriter, request: dict[str, Any] | None) -> None:
        with contextlib.suppress(ConnectionError):  # the process has ended, and its reports have the reason
            while request is not None:
                stdin.write(json.dumps(request).encode() + b"\n")
                await stdin.drain()
                request = await self._requests.get()
        stdin.close()

    async def _read_reports(self, stdout: asyncio.StreamReader) -> str:
        """Pass the ends of episodes to their sessions until the process ends; return why it ended."""
        refused = ""
        while line := await stdout.readline():
            report = json.loads(line)
            if "refused" in report:
                refused = str(report["refused"])
                continue
            ending = msgspec.convert(report, type=EpisodeReport)
            session = self._sessions.pop(ending.ended, None)
            if session is not None:  # None if the episode was cancelled
                session.end(ending)
        return refused or "its process ended; this actor's log has its output"


_HOSTS: dict[tuple[asyncio.AbstractEventLoop, HostSettings], VerifiersHost] = {}


def join_host(settings: HostSettings) -> VerifiersHost:
    """Return this event loop's process for `settings`, and start it at first. Call `leave_host` for each join."""
    key = (asyncio.get_running_loop(), settings)
    host = _HOSTS.get(key)
    if host is None or host.is_lost:
        host = _HOSTS[key] = VerifiersHost(settings)
    host.num_users += 1
    return host


async def leave_host(host: VerifiersHost, name: str) -> None:
    """Cancel the episode `name` and stop using `host`; its last user ends the process."""
    host.end(name)
    host.num_users -= 1
    if host.num_users == 0:
        for key in [key for key, known in _HOSTS.items() if known is host]:
            del _HOSTS[key]
        await host.stop()


def _sampling(sampling: Sampling) -> dict[str, float]:
    """Return the settings that verifiers sends with each request for tokens; the endpoint checks them."""
    top_k = {"top_k": sampling.top_k} if sampling.top_k else {}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_turn_tokens,
        **top_k,
    }


def _environment(settings: HostSettings) -> dict[str, str]:
    """Return the process's environment variables. PATH begins with the folder of its Python, which has `uv`."""
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    named = {theirs: os.environ[ours] for theirs, ours in settings.secrets}
    folder = str(Path(settings.python).absolute().parent)
    return kept | named | {"PATH": f"{folder}{os.pathsep}{kept.get('PATH', os.defpath)}"}
