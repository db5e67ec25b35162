"""The worker processes of an environment server, and the assignment of episodes to them.

The pool kills a worker that does not answer a request within the time that an environment may take. It replaces every
worker that has ended. The episodes of such a worker are lost: their clients get an error, and play them again.
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

from slipstream.common.process.shutdown import die_with_parent
from slipstream.common.process.wire import WireError
from slipstream.envhub.isolation.offspring import end_offspring_of
from slipstream.envhub.remote import env_protocol as protocol

GRACE_S = 5.0  # a worker cancels a request at its timeout; one that has not answered this long after it hangs
BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
HEALTHY_S = 60.0  # after a worker has run for this long, earlier crashes do not count
END_S = 5.0
START_S = 120.0  # a worker imports the catalogue, perhaps while all cores are busy
POLL_S = 0.05

log = logging.getLogger(__name__)


class WorkerFailed(RuntimeError):
    """A worker did not start."""


@dataclass(kw_only=True, slots=True)
class _Process:
    """One worker, from its start to its end."""

    process: asyncio.subprocess.Process
    requests: asyncio.StreamWriter
    responses: asyncio.StreamReader
    waiting: dict[int, asyncio.Future[bytes]] = field(default_factory=dict)  # by the number of the call
    num_episodes: int = 0
    why_lost: str = ""  # empty while the worker is healthy

    def kill(self, why: str) -> None:
        if not self.why_lost:
            self.why_lost = why
            log.warning("killing worker %d: %s", self.process.pid, why)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    @property
    def loss(self) -> bytes:
        """The response to every request for an episode of this worker, after the worker was lost."""
        return protocol.encode_message(protocol.EnvLost(why=f"the environment is lost: {self.why_lost}"))


class Episode:
    """A slot of the pool, and an environment in one of its processes."""

    def __init__(self, number: int, process: _Process, *, timeout_s: float) -> None:
        self._number = number
        self._process = process
        self._timeout_s = timeout_s
        self._num_calls = 0

    async def request(self, request: protocol.EnvRequest) -> bytes:
        """Return the worker's encoded response, or EnvLost if the worker is lost. Call it for one request at a time."""
        process, self._num_calls = self._process, self._num_calls + 1
        if process.why_lost:
            return process.loss
        call = (self._number << 32) + self._num_calls
        response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        process.waiting[call] = response
        try:
            numbered = protocol.WorkerRequest(call=call, episode=self._number, request=request)
            protocol.write_numbered(process.requests, numbered)
            async with asyncio.timeout(self._timeout_s):
                return await response
        except OverflowError as error:  # nothing was sent: MessagePack has no integers of more than 64 bits
            return protocol.encode_message(protocol.InvalidRequest(why=str(error)))
        except TimeoutError:
            process.kill(f"its process did not answer for {self._timeout_s:g} s, and could not be interrupted")
            return process.loss
        finally:
            del process.waiting[call]


class EnvPool:
    """Keeps worker processes running while `running` is entered."""

    def __init__(self, *, num_processes: int, max_episodes: int, step_timeout_s: float) -> None:
        self.max_episodes = max_episodes
        self.num_episodes = 0
        self.num_lost = 0  # workers that were killed or that crashed
        self._num_processes = num_processes
        self._step_timeout_s = step_timeout_s
        self._slots = asyncio.Semaphore(max_episodes)
        self._processes: dict[int, _Process] = {}  # the healthy workers by their place in the pool
        self._num_opened = 0

    @property
    def num_workers(self) -> int:
        """The number of healthy workers."""
        return len(self._processes)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the workers, and end them on exit. Raises WorkerFailed if one does not start."""
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
        """Yield an episode, not opened yet. Waits for a slot, and for a worker if all are being replaced."""
        async with self._slots:
            self.num_episodes += 1
            try:
                process = await self._least_busy()
                process.num_episodes += 1
                self._num_opened += 1
                episode = Episode(self._num_opened, process, timeout_s=self._step_timeout_s + GRACE_S)
                try:
                    yield episode
                finally:
                    process.num_episodes -= 1
                    await asyncio.shield(asyncio.create_task(episode.request(protocol.Close())))
            finally:
                self.num_episodes -= 1

    async def _least_busy(self) -> _Process:
        while True:
            healthy = [process for process in self._processes.values() if not process.why_lost]
            if healthy:
                return min(healthy, key=lambda process: process.num_episodes)
            await asyncio.sleep(POLL_S)

    async def _keep(self, place: int, process: _Process) -> None:
        """Keep a worker in this place of the pool: pass on its responses until it ends, then start the next one."""
        loop, num_crashes = asyncio.get_running_loop(), 0
        while True:
            self._processes[place], started = process, loop.time()
            try:
                await _pass_on(process)
            finally:
                del self._processes[place]
                await _end(process)
            self.num_lost += 1
            num_crashes = 1 if loop.time() - started > HEALTHY_S else num_crashes + 1
            process = await self._next(num_crashes)

    async def _next(self, num_crashes: int) -> _Process:
        while True:
            log.warning("a worker was lost; starting another")
            await asyncio.sleep(BACK_OFF_S[min(num_crashes, len(BACK_OFF_S)) - 1])
            try:
                return await _start(self._step_timeout_s)
            except WorkerFailed:
                num_crashes += 1


async def _start(step_timeout_s: float) -> _Process:
    """Start a worker and return it when it is ready. Raises WorkerFailed."""
    ours, theirs = socket.socketpair()
    program = [sys.executable, "-P", "-m", "slipstream.envhub.serving.env_worker"]
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *program,
            str(theirs.fileno()),
            str(step_timeout_s),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C goes to the server alone, which ends its workers
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    responses, requests = await asyncio.open_connection(sock=ours)
    try:
        async with asyncio.timeout(START_S):
            ready = await protocol.read_numbered(responses, msgspec.msgpack.Decoder(protocol.WorkerResponse))
            if ready is None:
                code = await process.wait()
                raise WorkerFailed(f"a worker ended with {code} before it was ready; the log above has its output")
            return _Process(process=process, requests=requests, responses=responses)
    except BaseException as error:
        requests.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if isinstance(error, TimeoutError):
            raise WorkerFailed(f"a worker was not ready after {START_S:g} s") from error
        raise


async def _pass_on(process: _Process) -> None:
    """Pass responses to their callers until the worker ends or is killed."""
    decoder = msgspec.msgpack.Decoder(protocol.WorkerResponse)
    try:
        while (response := await protocol.read_numbered(process.responses, decoder)) is not None:
            waiting = process.waiting.get(response.call)  # None if the caller was cancelled
            if waiting is not None and not waiting.done():
                waiting.set_result(bytes(response.response))
    except WireError as error:
        process.kill(f"it sent a malformed response: {error}")


async def _end(process: _Process) -> None:
    """Ask the worker to end by closing its socket, kill it if it does not, and answer its callers with EnvLost."""
    process.requests.close()
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
    await asyncio.to_thread(end_offspring_of, process.process.pid)  # a killed worker did not end its child processes
