"""The worker processes of an environment server, and the episodes that are shared out over them.

A worker that leaves an ask unanswered for longer than an environment may take is killed. Where one is gone, so or by
itself, another takes its place; its episodes are lost: whoever plays one is told so, and plays it again.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from common.shutdown import die_with_parent
from common.wire import WireError
from envhub.remote.env_protocol import (
    Ask,
    Close,
    Done,
    EnvLost,
    Order,
    encode_message,
    read_numbered,
    write_numbered,
)

GRACE_S = 5.0  # a worker cuts what takes too long itself; one that does not even do that hangs
BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
WELL_S = 60.0  # what ran for so long was well: earlier crashes count no more
END_S = 5.0
START_S = 120.0  # it imports the catalogue, perhaps while all cores are busy
POLL_S = 0.05

log = logging.getLogger(__name__)


class WorkerFailed(RuntimeError):
    """A worker does not start."""


@dataclass(kw_only=True, slots=True)
class _Process:
    """One worker, from its start to its end."""

    process: asyncio.subprocess.Process
    orders: asyncio.StreamWriter
    answers: asyncio.StreamReader
    waiting: dict[int, asyncio.Future[bytes]] = field(default_factory=dict)  # by the number of the call
    num_episodes: int = 0
    why_lost: str = ""  # empty while it is well

    def kill(self, why: str) -> None:
        if not self.why_lost:
            self.why_lost = why
            log.warning("worker %d is killed: %s", self.process.pid, why)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    @property
    def loss(self) -> bytes:
        """What whoever has an episode here is answered, once this is lost."""
        return encode_message(EnvLost(why=f"the environment is lost: {self.why_lost}"))


class Episode:
    """A slot of the pool, and an environment in one of its processes."""

    def __init__(self, number: int, process: _Process, *, patience_s: float) -> None:
        self._number = number
        self._process = process
        self._patience_s = patience_s
        self._num_calls = 0

    async def ask(self, ask: Ask) -> bytes:
        """The worker's answer, as it travels; where the worker is lost, that it is. Never more than one at a time."""
        process, self._num_calls = self._process, self._num_calls + 1
        if process.why_lost:
            return process.loss
        call = (self._number << 32) + self._num_calls
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        process.waiting[call] = answer
        try:
            write_numbered(process.orders, Order(call=call, episode=self._number, ask=ask))
            async with asyncio.timeout(self._patience_s):
                return await answer
        except TimeoutError:
            process.kill(f"its process had no answer for {self._patience_s:g} s, and could not be interrupted")
            return process.loss
        finally:
            del process.waiting[call]


class EnvPool:
    """Worker processes, as long as `run` runs."""

    def __init__(self, *, num_processes: int, max_episodes: int, step_timeout_s: float) -> None:
        self.max_episodes = max_episodes
        self.num_episodes = 0
        self.num_lost = 0  # workers that were killed or ended by themselves
        self._num_processes = num_processes
        self._step_timeout_s = step_timeout_s
        self._slots = asyncio.Semaphore(max_episodes)
        self._processes: dict[int, _Process] = {}  # those that are well, by their place in the pool
        self._num_opened = 0

    @property
    def num_workers(self) -> int:
        """Those that are well."""
        return len(self._processes)

    @property
    def is_full(self) -> bool:
        return self._slots.locked()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The workers are started here, and gone behind it. Raises WorkerFailed where one does not start."""
        started = await asyncio.gather(*(_start(self._step_timeout_s) for _ in range(self._num_processes)))
        keepers = [asyncio.create_task(self._keep(place, process)) for place, process in enumerate(started)]
        try:
            yield
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode]:
        """An episode, opened by nobody yet; waits for a slot, and for a worker where all are just being replaced."""
        async with self._slots:
            self.num_episodes += 1
            try:
                process = await self._least_busy()
                process.num_episodes += 1
                self._num_opened += 1
                episode = Episode(self._num_opened, process, patience_s=self._step_timeout_s + GRACE_S)
                try:
                    yield episode
                finally:
                    process.num_episodes -= 1
                    await asyncio.shield(asyncio.create_task(episode.ask(Close())))
            finally:
                self.num_episodes -= 1

    async def _least_busy(self) -> _Process:
        while True:
            well = [process for process in self._processes.values() if not process.why_lost]
            if well:
                return min(well, key=lambda process: process.num_episodes)
            await asyncio.sleep(POLL_S)

    async def _keep(self, place: int, process: _Process) -> None:
        """Have a worker in this place: hear out the one that is there, and start the next."""
        loop, num_crashes = asyncio.get_running_loop(), 0
        while True:
            self._processes[place], started = process, loop.time()
            try:
                await _hear(process)
            finally:
                del self._processes[place]
                await _end(process)
            self.num_lost += 1
            num_crashes = 1 if loop.time() - started > WELL_S else num_crashes + 1
            process = await self._next(num_crashes)

    async def _next(self, num_crashes: int) -> _Process:
        while True:
            log.warning("a worker was lost; another takes its place")
            await asyncio.sleep(BACK_OFF_S[min(num_crashes, len(BACK_OFF_S)) - 1])
            try:
                return await _start(self._step_timeout_s)
            except WorkerFailed:
                num_crashes += 1


async def _start(step_timeout_s: float) -> _Process:
    """A worker that is ready. Raises WorkerFailed."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "envhub.serving.env_worker", str(theirs.fileno()), str(step_timeout_s),
            stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the server, which ends its workers
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
    answers, orders = await asyncio.open_connection(sock=ours)
    try:
        async with asyncio.timeout(START_S):
            ready = await read_numbered(answers, msgspec.msgpack.Decoder(Done))
            if ready is None:
                code = await process.wait()
                raise WorkerFailed(f"a worker ended with {code} before it was ready; its own words are above")
            return _Process(process=process, orders=orders, answers=answers)
    except BaseException as error:
        orders.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if isinstance(error, TimeoutError | WireError):
            raise WorkerFailed(f"a worker is not ready after {START_S:g} s, or said what is no answer") from error
        raise


async def _hear(process: _Process) -> None:
    """Hand out answers until the worker ends, by itself or because it was killed."""
    decoder = msgspec.msgpack.Decoder(Done)
    try:
        while (done := await read_numbered(process.answers, decoder)) is not None:
            waiting = process.waiting.get(done.call)  # None where nobody waits any more
            if waiting is not None and not waiting.done():
                waiting.set_result(bytes(done.answer))
    except WireError as error:
        process.kill(f"it said what is no answer: {error}")


async def _end(process: _Process) -> None:
    """Close its socket, which asks it to end; kill it where it does not; tell whoever still waits for it."""
    process.orders.close()
    try:
        async with asyncio.timeout(END_S):
            code = await process.process.wait()
    except (TimeoutError, asyncio.CancelledError):
        process.process.kill()
        code = await process.process.wait()
    process.why_lost = process.why_lost or f"its process ended with {code}"
    for waiting in process.waiting.values():
        if not waiting.done():
            waiting.set_result(process.loss)
