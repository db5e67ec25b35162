"""The engine that serves: vLLM in a process of its own, which this side gives orders and hears from.

Orders are written by the event loop itself: the process reads all of them between two steps, so that a write waits for
one step at most, and only where hundreds of kilobytes of prompts are on their way. A thread hears the answers.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from actors.engine import Completion, EngineDied, EngineError, EngineLoad, WeightsRefused
from actors.orders import (
    Abort,
    Answer,
    Commit,
    Committed,
    Died,
    Ended,
    EngineSettings,
    Failed,
    Generate,
    LeaveBroadcasts,
    Order,
    Refused,
    Stage,
    Staged,
    Started,
    Stepped,
    Stop,
)
from actors.vllm_environment import vllm_environment
from common.shutdown import die_with_parent
from common.trajectory import Sampling
from common.weights import Offer

START_TIMEOUT_S = 600.0  # a large model loads from a slow disk
CLOSE_TIMEOUT_S = 5.0  # it holds nothing that could be lost


class EngineProcess:
    """The process and the socket to it. It begins to import vLLM at once, which takes 10 s.

    Construct it on a thread that lives as long as it: the process dies with the thread that started it.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "actors.serve_engine", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | vllm_environment(),
                start_new_session=True,  # Ctrl-C is for the actor to answer
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, order: Order) -> None:
        """Raises OSError when the process is gone."""
        self._connection.send_bytes(msgspec.msgpack.encode(order))

    def hear(self, *, timeout_s: float | None = None) -> Answer:
        """Wait for what it says next. Raises EngineDied when it is gone or, with `timeout_s`, stays silent."""
        try:
            if timeout_s is not None and not self._connection.poll(timeout_s):
                raise EngineDied(f"the engine process has said nothing for {timeout_s:.0f} s")
            answer: Answer = msgspec.msgpack.decode(self._connection.recv_bytes(), type=Answer)
        except (EOFError, OSError):
            raise EngineDied(f"the engine process ended with exit code {self._popen.wait()}") from None
        if isinstance(answer, Died):
            raise EngineDied(f"the engine process failed: {answer.why}")
        return answer

    def end(self, timeout_s: float) -> None:
        """Wait for its end, and bring it about after `timeout_s`."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class VllmEngine:
    """actors.engine.Engine by vLLM. When its process is gone, all that waits for it gets an EngineDied."""

    def __init__(self, process: EngineProcess, settings: EngineSettings) -> None:
        """Have `process` load the model. Blocks for 5 to 15 s.

        Raises ValueError where vLLM refuses the model or the sizes, EngineDied where it does not start.
        """
        self._process = process
        self._max_tokens = settings.max_tokens
        self._policy_version = settings.policy_version
        self._staged_version: int | None = None
        # A guard only: an abandoned stage may have to end first, and each may miss its broadcast and then pull.
        self._stage_timeout_s = 4 * settings.receiver.timeout_s
        self._calls = itertools.count()
        self._generating: dict[int, asyncio.Future[Completion]] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # stages and commits
        self._generated_tokens, self._kv_use = 0, 0.0
        self._death: EngineDied | None = None
        self._closing = False
        self._dying = threading.Lock()  # an order either comes before the end, and is told of it, or is refused
        try:
            started = self._start(settings)
        except BaseException:
            process.end(timeout_s=0)
            raise
        self._vocab_size, self._name = started.vocab_size, started.engine
        threading.Thread(target=self._hear, name="engine-answers", daemon=True).start()

    @property
    def name(self) -> str:
        """As `vllm 0.32.0 cpu`."""
        return self._name

    @property
    def policy_version(self) -> int:
        """The version that the next token will come from."""
        return self._policy_version

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._process.pid

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        """Continue `tokens` up to an end-of-turn token, `sampling.max_turn_tokens` or the end of the context.

        At temperature 0 the likeliest tokens come, with their log-probabilities at temperature 1. With `seed` the
        request draws from a generator of its own. Cancelling the awaiting task frees the request.

        Raises ValueError for a prompt that leaves no room or that is not of this model's tokens, EngineError when this
        generation cannot be had, EngineDied when the engine is gone.
        """
        check_prompt(tokens, max_tokens=self._max_tokens, vocab_size=self._vocab_size)
        num_tokens = min(sampling.max_turn_tokens, self._max_tokens - len(tokens))
        call = next(self._calls)
        order = Generate(call=call, tokens=tokens, num_tokens=num_tokens, sampling=sampling, seed=seed)
        try:
            completion: Completion = await self._ordered(order, self._generating)
        except asyncio.CancelledError:
            self._send(Abort(call=call))
            raise
        return completion

    async def stage(self, offer: Offer) -> None:
        """Receive and verify the offered weights while generation goes on. One stage at a time.

        Raises WeightsRefused when they did not arrive whole or do not fit the model; the old ones keep serving.
        """
        self._staged_version = None
        version = offer.manifest.policy_version
        try:
            async with asyncio.timeout(self._stage_timeout_s):
                staged: Staged = await self._ordered(Stage(call=next(self._calls), offer=offer), self._waiting)
        except TimeoutError:
            raise WeightsRefused(f"version {version} is not here after {self._stage_timeout_s:.0f} s") from None
        if staged.refusal is not None:
            raise WeightsRefused(staged.refusal)
        self._staged_version = version

    async def commit(self, policy_version: int) -> float:
        """Swap the staged weights in between two steps; running requests go on. Return the pause in seconds.

        Raises ValueError unless `policy_version` is what was staged, EngineDied when the engine is gone.
        """
        if policy_version != self._staged_version:
            raise ValueError(
                f"commit of version {policy_version}, but staged is {self._staged_version}: stage it first"
            )
        self._staged_version = None
        order = Commit(call=next(self._calls), policy_version=policy_version)
        committed: Committed = await self._ordered(order, self._waiting)
        self._policy_version = policy_version
        return committed.pause_s

    def leave_broadcasts(self) -> None:
        """Take part in no further broadcast of weights, so that none waits for this actor. Does not wait."""
        self._send(LeaveBroadcasts())

    def load(self) -> EngineLoad:
        """What is running now; the tokens of a generation count when it ends. Raises EngineDied."""
        if self._death is not None:
            raise _again(self._death)
        return EngineLoad(
            num_running=len(self._generating), kv_use=self._kv_use, generated_tokens=self._generated_tokens
        )

    async def close(self) -> None:
        """End the process; what still waits gets an EngineDied. Idempotent."""
        self._closing = True
        self._send(Stop())
        await asyncio.to_thread(self._process.end, CLOSE_TIMEOUT_S)
        self._die(EngineDied("the engine ended: close() was called"))

    def _start(self, settings: EngineSettings) -> Started:
        self._send(settings)
        match self._process.hear(timeout_s=START_TIMEOUT_S):
            case Started() as started:
                return started
            case Refused(why=why):
                raise ValueError(why)
            case unexpected:
                raise EngineDied(f"the engine process began with {unexpected}")

    async def _ordered(
        self, order: Generate | Stage | Commit, pending: dict[int, asyncio.Future[Any]]
    ) -> Any:  # fmt: skip
        """What comes of `order`. Raises EngineDied, if need be long after it was placed."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._dying:
            if self._death is not None:
                raise _again(self._death)
            pending[order.call] = future
        self._send(order)
        try:
            return await future
        finally:
            pending.pop(order.call, None)

    def _send(self, order: Order) -> None:
        with contextlib.suppress(OSError):  # the process is gone, and those who wait will hear how
            self._process.send(order)

    # The hearing thread's part.

    def _hear(self) -> None:
        try:
            while True:
                self._note(self._process.hear())
        except EngineDied as error:
            self._die(EngineDied("the engine ended: close() was called") if self._closing else error)

    def _note(self, answer: Answer) -> None:
        match answer:
            case Stepped(over=over, kv_use=kv_use):
                self._kv_use = kv_use
                for generation in over:
                    self._note_over(generation)
            case Staged(call=call) | Committed(call=call):
                _settle(self._waiting.get(call), answer)

    def _note_over(self, generation: Ended | Failed) -> None:
        future = self._generating.get(generation.call)  # None where nobody waits any more
        if isinstance(generation, Failed):
            _settle(future, EngineError(generation.why))
            return
        self._generated_tokens += len(generation.tokens)
        completion = Completion(
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            kept=generation.kept,
            version_spans=generation.version_spans,
            finish_reason=generation.finish_reason,
        )
        _settle(future, completion)

    def _die(self, death: EngineDied) -> None:
        with self._dying:
            self._death = self._death or death
            waiting = [*self._generating.values(), *self._waiting.values()]
        for future in waiting:
            _settle(future, _again(self._death))


def check_prompt(tokens: list[int], *, max_tokens: int, vocab_size: int) -> None:
    """Raise ValueError for a prompt that the engine cannot continue; in a batch it would take the others down."""
    if not 1 <= len(tokens) < max_tokens:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens; it must have at least 1, and leave room for 1 more in "
            f"`model.max_tokens` = {max_tokens}: end the episode before its context is full"
        )
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(
            f"token ids in [{min(tokens)}, {max(tokens)}], the model has [0, {vocab_size}): use its own tokenizer"
        )


def _again(death: EngineDied) -> EngineDied:
    """A new exception for each who must hear of it: one that is raised many times would grow its traceback."""
    return EngineDied(str(death))


def _settle(future: asyncio.Future[Any] | None, result: object) -> None:
    """Give `result` to who awaits `future`, in its own loop."""
    if future is not None:
        with contextlib.suppress(RuntimeError):  # that loop is closed: nobody awaits
            future.get_loop().call_soon_threadsafe(_resolve, future, result)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if future.done():
        return  # cancelled meanwhile
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
