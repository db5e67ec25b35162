"""The actor's side of the engine process, which runs vLLM: sends orders and receives answers.

The event loop itself writes the orders. The process reads all of them between two steps, so a write blocks for one step
at most, and only if hundreds of kilobytes of prompts are in the socket. A thread receives the answers.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from slipstream.actors.engine import orders
from slipstream.actors.engine.engine import Completion, EngineDied, EngineError, EngineLoad, EngineSpoiled, Served
from slipstream.actors.engine.vllm_environment import vllm_environment
from slipstream.actors.weights.refused import WeightsRefused, WeightsUnfit
from slipstream.common.process.shutdown import die_with_parent
from slipstream.common.records.tool_call import ParsedAnswer
from slipstream.common.records.trajectory import Sampling
from slipstream.common.transfer.weights import Offer

ENGINE_MODULE = "slipstream.actors.engine.serve_engine"  # what the engine process runs
START_TIMEOUT_S = 600.0  # enough to load a large model from a slow disk
CLOSE_TIMEOUT_S = 5.0  # then the process is killed; it has no data that could be lost
MAX_SILENCE_S = 120.0  # it sends a message every second, but only between two steps: one step may be slow on a CPU
POLL_S = 1.0


class EngineProcess:
    """The engine process and the socket to it. It begins to import vLLM at once, which takes 10 s.

    Construct it on a thread that lives as long as the process: the process ends when that thread ends.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", ENGINE_MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | vllm_environment(),
                start_new_session=True,  # so that Ctrl-C reaches only the actor
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self._connection = Connection(ours.detach())

    def send(self, order: orders.Order) -> None:
        """Send an order. Raises OSError if the process is gone."""
        self._connection.send_bytes(msgspec.msgpack.encode(order))

    def receive(self, *, timeout_s: float) -> orders.Answer:
        """Wait for the next answer. Raises EngineDied if the process is gone or sends nothing for `timeout_s`.

        Only time in which this process itself runs is counted: if both processes were suspended together, the engine
        could not send anything.
        """
        waited_s = 0.0
        try:
            while not self._connection.poll(POLL_S):
                waited_s += POLL_S
                if waited_s >= timeout_s:
                    self.end(timeout_s=0)
                    raise EngineDied(f"the engine process hangs: it has sent nothing for {waited_s:.0f} s")
            answer: orders.Answer = msgspec.msgpack.decode(self._connection.recv_bytes(), type=orders.Answer)
        except (EOFError, OSError):
            self.end(CLOSE_TIMEOUT_S)
            raise EngineDied(f"the engine process ended with exit code {self._popen.returncode}") from None
        if isinstance(answer, orders.Died):
            raise EngineDied(f"the engine process failed: {answer.why}")
        return answer

    def end(self, timeout_s: float) -> None:
        """Wait for the end of the process, and kill it after `timeout_s`."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class VllmEngine:
    """An Engine that runs vLLM. If its process dies, every waiting call raises EngineDied."""

    def __init__(self, process: EngineProcess, settings: orders.EngineSettings) -> None:
        """Make `process` load the model. Blocks for 5 to 15 s. A process that is silent for MAX_SILENCE_S is killed.

        Raises ValueError if vLLM refuses the model or the sizes, EngineDied if it does not start.
        """
        self._process = process
        self._max_tokens = settings.model.max_tokens
        self._served = Served(settings.policy_version)
        self._staged_version: int | None = None
        # A safeguard: an older stage may have to end first, and each may miss its broadcast and then pull.
        self._stage_timeout_s = 4 * settings.receiver.timeout_s
        self._calls = itertools.count()
        self._generating: dict[int, asyncio.Future[Completion]] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # stages, commits and parses
        self._generated_tokens, self._running_tokens, self._kv_use = 0, 0, 0.0
        self._death: EngineDied | None = None
        self._closing = False
        self._dying = threading.Lock()  # so that no call is added after the waiting calls got their EngineDied
        try:
            started = self._start(settings)
        except BaseException:
            process.end(timeout_s=0)
            raise
        self._vocab_size = started.vocab_size
        self.name = started.engine  # with its version and kind of device, such as `vllm 0.32.0 cpu`
        threading.Thread(target=self._receive_answers, name="engine-answers", daemon=True).start()

    @property
    def policy_version(self) -> int:
        return self._served.policy_version

    async def serving(self, policy_version: int) -> None:
        await self._served.reach(policy_version)

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        """Continue `tokens` up to an end-of-turn token, `sampling.max_turn_tokens` or the end of the context.

        At temperature 0 it returns the most likely tokens, with their log-probabilities at temperature 1. With `seed`
        the request has a random generator of its own. Cancelling the awaiting task aborts the request.

        Raises ValueError for a prompt that leaves no room or contains unknown tokens, EngineError if this generation
        fails, EngineDied if the engine is gone.
        """
        check_prompt(tokens, max_tokens=self._max_tokens, vocab_size=self._vocab_size)
        num_tokens = min(sampling.max_turn_tokens, self._max_tokens - len(tokens))
        order = orders.Generate(
            call=next(self._calls), tokens=tokens, num_tokens=num_tokens, sampling=sampling, seed=seed
        )
        try:
            completion: Completion = await self._ordered(order, self._generating)
        except asyncio.CancelledError:
            self._send(orders.Abort(call=order.call))
            raise
        return completion

    async def parse(
        self, text: str, *, tokens: list[int], prompt: list[int], tools: list[dict[str, Any]]
    ) -> ParsedAnswer:
        order = orders.Parse(call=next(self._calls), prompt=prompt, tokens=tokens, text=text, tools=tools)
        parsed: orders.Parsed = await self._ordered(order, self._waiting)
        return parsed.answer

    async def stage(self, offer: Offer) -> None:
        self._staged_version = None
        version, probe = offer.manifest.policy_version, offer.manifest.probe
        if probe is not None:
            try:
                check_prompt(probe.tokens, max_tokens=self._max_tokens, vocab_size=self._vocab_size)
            except ValueError as error:
                raise WeightsUnfit(f"version {version}: its probe is for another model: {error}") from error
        try:
            async with asyncio.timeout(self._stage_timeout_s):
                staged: orders.Staged = await self._ordered(
                    orders.StageWeights(call=next(self._calls), offer=offer), self._waiting
                )
        except TimeoutError:
            raise WeightsRefused(f"version {version} has not arrived after {self._stage_timeout_s:.0f} s") from None
        if staged.refusal is not None:
            raise (WeightsUnfit if staged.unfit else WeightsRefused)(staged.refusal)
        self._staged_version = version

    async def commit(self, policy_version: int) -> float:
        """Switch between two steps, and return when the engine has scored the version's probe.

        No token that the version samples before leaves the engine unless it passes. Raises ValueError unless
        `policy_version` is staged.
        """
        if policy_version != self._staged_version:
            raise ValueError(
                f"commit of version {policy_version}, but staged is {self._staged_version}: stage it first"
            )
        self._staged_version = None
        order = orders.Commit(call=next(self._calls), policy_version=policy_version)
        committed: orders.Committed = await self._ordered(order, self._waiting)
        if committed.refusal is not None:
            raise (WeightsUnfit if committed.reverted else EngineSpoiled)(committed.refusal)
        self._served.change(policy_version)
        return committed.pause_s

    def leave_broadcasts(self) -> None:
        self._send(orders.LeaveBroadcasts())

    def load(self) -> EngineLoad:
        if self._death is not None:
            raise _again(self._death)
        return EngineLoad(
            num_running=len(self._generating),
            kv_use=self._kv_use,
            generated_tokens=self._generated_tokens,
            running_tokens=self._running_tokens,
        )

    async def close(self) -> None:
        self._closing = True
        self._send(orders.Stop())
        await asyncio.to_thread(self._process.end, CLOSE_TIMEOUT_S)
        self._die(EngineDied("the engine ended: close() was called"))

    def _start(self, settings: orders.EngineSettings) -> orders.Started:
        self._send(settings)
        match self._process.receive(timeout_s=START_TIMEOUT_S):
            case orders.Started() as started:
                return started
            case orders.Refused(why=why):
                raise ValueError(why)
            case unexpected:
                raise EngineDied(f"the engine process answered its settings with {unexpected}")

    async def _ordered(
        self,
        order: orders.Generate | orders.Parse | orders.StageWeights | orders.Commit,
        pending: dict[int, asyncio.Future[Any]],
    ) -> Any:
        """Send `order` and wait for its answer. Raises EngineDied."""
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

    def _send(self, order: orders.Order) -> None:
        with contextlib.suppress(OSError):  # the process is gone; the receiving thread reports it
            self._process.send(order)

    # The methods of the receiving thread.

    def _receive_answers(self) -> None:
        try:
            while True:
                self._note(self._process.receive(timeout_s=MAX_SILENCE_S))
        except EngineDied as error:
            self._die(EngineDied("the engine ended: close() was called") if self._closing else error)

    def _note(self, answer: orders.Answer) -> None:
        match answer:
            case orders.Stepped(over=over, kv_use=kv_use, running_tokens=running_tokens):
                self._kv_use, self._running_tokens = kv_use, running_tokens
                _settle(*((self._generating.get(each.call), self._result(each)) for each in over))
            case orders.Staged(call=call) | orders.Committed(call=call) | orders.Parsed(call=call):
                _settle((self._waiting.get(call), answer))

    def _result(self, generation: orders.Ended | orders.Failed) -> Completion | EngineError:
        if isinstance(generation, orders.Failed):
            return EngineError(generation.why)
        self._generated_tokens += len(generation.completion.tokens)
        return generation.completion

    def _die(self, death: EngineDied) -> None:
        with self._dying:
            self._death = self._death or death
            waiting = [*self._generating.values(), *self._waiting.values()]
            death = self._death
        _settle(*((future, _again(death)) for future in waiting))


def check_prompt(tokens: list[int], *, max_tokens: int, vocab_size: int) -> None:
    """Raise ValueError for a prompt that the engine cannot continue: it would make the whole batch fail."""
    if not 1 <= len(tokens) < max_tokens:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens; it must have at least 1, and leave room for 1 more in "
            f"`model.max_tokens` = {max_tokens}; end the episode before its context is full"
        )
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(
            f"token ids in [{min(tokens)}, {max(tokens)}], the model has [0, {vocab_size}); use its own tokenizer"
        )


def _again(death: EngineDied) -> EngineDied:
    """A new exception for each waiting call: an exception that is raised many times collects tracebacks."""
    return EngineDied(str(death))


def _settle(*results: tuple[asyncio.Future[Any] | None, object]) -> None:
    """Set results of futures in their event loops. None is the future of a cancelled call.

    A loop is woken once for all of its futures: many generations end in the same step.
    """
    by_loop = defaultdict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], object]]](list)
    for future, result in results:
        if future is not None:
            by_loop[future.get_loop()].append((future, result))
    for loop, own in by_loop.items():
        with contextlib.suppress(RuntimeError):  # that loop is closed
            loop.call_soon_threadsafe(_resolve, own)


def _resolve(results: list[tuple[asyncio.Future[Any], object]]) -> None:
    for future, result in results:
        if future.done():
            continue  # it was cancelled meanwhile
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
