"""A process of `verifiers`, and the endpoint that its episodes ask: what the episodes of one configuration share.

It takes seconds to import, so the process lives as long as one of them does. Its Python is the user's, as its pins
clash with ours, and of the actor's environment it inherits what a program needs, without secrets.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from common.trajectory import Sampling, Task
from envhub.env import EnvError
from envhub.adapters.generate_server import GenerateServer
from envhub.adapters.verifiers_session import Ending, Session

DRIVER = Path(__file__).with_name("verifiers_driver.py")
MAX_LINE_BYTES = 64 << 20  # of what is told of an episode, with all that was sampled in it
END_S = 5.0  # for what runs there to be cleared away
INHERITED = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "OMP_NUM_THREADS", "UV_CACHE_DIR", "UV_OFFLINE",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSettings:
    """What makes one process another. The first three are verifiers' own, as JSON."""

    config: str
    held_out: str
    renderer: str
    python: str
    secrets: frozenset[tuple[str, str]]  # (variable there, variable of the actor)
    model_folder: str
    max_tokens: int
    max_turns: int
    end_tokens: frozenset[int]


class VerifiersHost:
    """One process, from the first episode that wants it to the last. Made, used and stopped in one event loop."""

    def __init__(self, settings: HostSettings) -> None:
        self.num_users = 0
        self._settings = settings
        self._sessions: dict[str, Session] = {}
        self._orders: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._running = asyncio.create_task(self._run())

    @property
    def is_lost(self) -> bool:
        return self._running.done()

    def begin(self, task: Task, session: Session) -> str:
        """Have an episode played, and all that comes of it told to `session`. Return its name."""
        name = secrets.token_hex(16)
        self._sessions[name] = session
        order = {"run": name, "split": task.split, "index": task.index, "sampling": _sampling(session.sampling)}
        self._orders.put_nowait(order)
        return name

    def end(self, name: str) -> None:
        """Cut an episode off, unless it is over."""
        if self._sessions.pop(name, None) is not None:
            self._orders.put_nowait({"cancel": name})

    async def stop(self) -> None:
        """End the process: it clears away what it runs, and is killed where that takes long."""
        self._orders.put_nowait(None)
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
            async with server.listening() as url, self._process() as process:
                assert process.stdin is not None and process.stdout is not None
                writing = asyncio.create_task(self._write(process.stdin, _first_order(settings, url, secret)))
                try:
                    why = await self._hear(process.stdout)
                finally:
                    writing.cancel()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            for session in self._sessions.values():
                session.events.put_nowait(EnvError(f"verifiers cannot be used: {why}"))

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[Process]:
        # -P: the folder of the driver has modules named like some of the standard library's.
        process = await asyncio.create_subprocess_exec(
            self._settings.python, "-P", str(DRIVER), stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES,
            env=_environment(self._settings), start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _write(self, stdin: asyncio.StreamWriter, order: dict[str, Any] | None) -> None:
        with contextlib.suppress(ConnectionError):  # what ended it, the other side says
            while order is not None:
                stdin.write(json.dumps(order).encode() + b"\n")
                await stdin.drain()
                order = await self._orders.get()
        stdin.close()

    async def _hear(self, stdout: asyncio.StreamReader) -> str:
        """Tell the sessions of their ends, until the process does; return why that was."""
        refused = ""
        while line := await stdout.readline():
            news = json.loads(line)
            if "refused" in news:
                refused = str(news["refused"])
                continue
            ending = msgspec.convert(news, type=Ending)
            session = self._sessions.pop(ending.ended, None)
            if session is not None:  # else it was cut off
                session.events.put_nowait(ending)
        return refused or "its process ended; its last words are in this actor's log"


_HOSTS: dict[tuple[asyncio.AbstractEventLoop, HostSettings], VerifiersHost] = {}


def join_host(settings: HostSettings) -> VerifiersHost:
    """The process for `settings` that runs in this loop, or one that is started. Each join wants its `leave_host`."""
    key = (asyncio.get_running_loop(), settings)
    host = _HOSTS.get(key)
    if host is None or host.is_lost:
        host = _HOSTS[key] = VerifiersHost(settings)
    host.num_users += 1
    return host


async def leave_host(host: VerifiersHost) -> None:
    """The last one out ends the process."""
    host.num_users -= 1
    if host.num_users == 0:
        for key in [key for key, known in _HOSTS.items() if known is host]:
            del _HOSTS[key]
        await host.stop()


def _first_order(settings: HostSettings, url: str, secret: str) -> dict[str, Any]:
    return {
        "config": json.loads(settings.config),
        "held_out": json.loads(settings.held_out),
        "renderer": json.loads(settings.renderer),
        "model_folder": settings.model_folder,
        "max_turns": settings.max_turns,
        "url": url,
        "secret": secret,
    }


def _sampling(sampling: Sampling) -> dict[str, float]:
    """As verifiers passes it on to the endpoint, where it is checked."""
    cut = {"top_k": sampling.top_k} if sampling.top_k else {}
    return {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_turn_tokens, **cut
    }  # fmt: skip


def _environment(settings: HostSettings) -> dict[str, str]:
    """Of the process. Programs beside its Python come first, `uv` among them."""
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    named = {theirs: os.environ[ours] for theirs, ours in settings.secrets}
    folder = str(Path(settings.python).absolute().parent)
    return kept | named | {"PATH": f"{folder}{os.pathsep}{kept.get('PATH', os.defpath)}"}
