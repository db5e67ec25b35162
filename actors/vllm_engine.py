"""The engine that serves: vLLM in this process, stepped by one thread of ours.

The thread alone touches vLLM. Between two steps it does what others ordered: add a request, abort one, commit staged
weights. So a commit falls on a token boundary by construction, and the version of every token is exact.
"""

import asyncio
import contextlib
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer, GenerationConfig

from actors.engine import Completion, EngineError, EngineLoad, WeightsRefused
from actors.receive import ReceiverInfo
from common.trajectory import Sampling
from common.weights import Offer
from common.wire import encode

T = TypeVar("T")

START_TIMEOUT_S = 600.0  # a large model loads from a slow disk
STAGE_POLL_S = 0.02
CLOSE_TIMEOUT_S = 30.0

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process, so that our thread owns its steps
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # several actors share the cores: more threads each were 12 to 15 times slower
    "TORCHDYNAMO_DISABLE": "1",  # else the first request for log-probabilities compiles for 4 to 9 s
}


def prepare_environment() -> None:
    """Set what vLLM reads when it is imported; what is set already stays. Call it first thing in a process.

    Raises RuntimeError where vLLM was imported without it.
    """
    wanted = ENVIRONMENT if torch.cuda.is_available() else ENVIRONMENT | CPU_ENVIRONMENT
    missing = [name for name in wanted if name not in os.environ]
    if missing and "vllm" in sys.modules:
        raise RuntimeError(f"vLLM was imported without {missing}; call prepare_environment() at the top of the process")
    for name in missing:
        os.environ[name] = wanted[name]


@dataclass(frozen=True, slots=True)
class _Generation:
    """A request that vLLM is working on."""

    tokens: list[int]
    params: Any  # vLLM's SamplingParams
    future: asyncio.Future[Completion]


class VllmEngine:
    """actors.engine.Engine by vLLM. When the stepping thread fails, all that waits for it gets an EngineError."""

    def __init__(
        self,
        model_path: str,
        *,
        policy_version: int,
        seed: int,
        max_tokens: int,
        dtype: str,
        kv_cache_bytes: int,
        max_episodes: int,
        kv_policy: str,
        receiver: ReceiverInfo,
    ) -> None:
        """Start vLLM with the weights in folder `model_path`, those of `policy_version`. Blocks for 5 to 15 s.

        Call prepare_environment() first. `seed` must differ between actors, or they sample alike. `kv_policy` says what
        a commit does with the KV of running requests: "keep" it, or "recompute" it with the new weights.
        `kv_cache_bytes` is for a CPU; on a GPU the KV cache takes what the weights leave of 90 %.

        Raises EngineError when vLLM does not start.
        """
        from actors import vllm_start  # not at the top: vLLM reads the environment while it is imported

        self._vllm = vllm_start
        self._max_tokens = max_tokens
        self._kv_policy = kv_policy
        self._policy_version = policy_version
        self._staged_version: int | None = None
        # A guard only: an abandoned stage may have to end first, and each may miss its broadcast and then pull.
        self._stage_timeout_s = 4 * receiver.timeout_s
        self._stop_token_ids = stop_token_ids(model_path)
        self._request_ids = itertools.count()
        self._running: dict[str, _Generation] = {}
        self._generated_tokens = 0
        self._unsettled: set[asyncio.Future[Any]] = set()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None is the order to stop
        self._failure: Exception | None = None  # why there is no thread any more
        self._ending = threading.Lock()  # an order either comes before the thread's end, or is refused
        self._started = threading.Event()
        start = partial(
            vllm_start.start_vllm, model_path, receiver, policy_version=policy_version, seed=seed, dtype=dtype,
            max_model_len=max_tokens, kv_cache_memory_bytes=kv_cache_bytes, max_num_seqs=max_episodes,
        )  # fmt: skip
        # A daemon: an actor that dies without close() must not be kept alive by its engine.
        self._thread = threading.Thread(target=self._run, args=(start,), name="vllm-engine", daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise EngineError(f"vLLM did not start with {model_path} in {START_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            raise _engine_error(self._failure)

    @property
    def policy_version(self) -> int:
        """The version that the next token will come from."""
        return self._policy_version

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        """Continue `tokens` up to an end-of-turn token, `sampling.max_turn_tokens` or the end of the context.

        At temperature 0 the likeliest tokens come, with their log-probabilities at temperature 1. With `seed` the
        request draws from a generator of its own. Cancelling the awaiting task frees the request.

        Raises ValueError for a prompt that leaves no room or that is not of this model's tokens, EngineError when the
        engine fails.
        """
        check_prompt(tokens, max_tokens=self._max_tokens, vocab_size=self._vocab_size)
        num_tokens = min(sampling.max_turn_tokens, self._max_tokens - len(tokens))
        params = self._vllm.sampling_params(
            sampling, num_tokens=num_tokens, seed=seed, stop_token_ids=self._stop_token_ids
        )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request_id = str(next(self._request_ids))
        self._order(partial(self._add, request_id, _Generation(tokens, params, future)), future)
        try:
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):  # it ended by itself, and the request with it
                self._order(partial(self._abort, request_id), None)
            raise

    async def stage(self, offer: Offer) -> None:
        """Receive and verify the offered weights while generation goes on. One stage at a time.

        Raises WeightsRefused when they did not arrive whole or do not fit the model; the old ones keep serving.
        """
        self._staged_version = None
        try:
            async with asyncio.timeout(self._stage_timeout_s):
                await self._on_workers("stage_weights", encode(offer))
                while not all(await self._on_workers("stage_ended")):  # noqa: ASYNC110 — the worker may be a process
                    await asyncio.sleep(STAGE_POLL_S)
        except TimeoutError:
            raise WeightsRefused(f"version {offer.manifest.policy_version} is not here after the deadline") from None
        for refusal in await self._on_workers("stage_refusal"):
            if refusal is not None:
                raise WeightsRefused(refusal)
        self._staged_version = offer.manifest.policy_version

    async def commit(self, policy_version: int) -> float:
        """Swap the staged weights in between two steps; running requests go on. Return the pause in seconds.

        Raises ValueError unless `policy_version` is what was staged, EngineError when the engine fails.
        """
        if policy_version != self._staged_version:
            raise ValueError(
                f"commit of version {policy_version}, but staged is {self._staged_version}: stage it first"
            )
        self._staged_version = None
        return await self._call(partial(self._commit, policy_version))

    def load(self) -> EngineLoad:
        """What is running now; the tokens of a generation count when it ends."""
        return EngineLoad(
            num_running=len(self._running),
            kv_use=self._kv_cache.usage,  # two counters: safe to read from any thread
            generated_tokens=self._generated_tokens,
        )

    async def close(self) -> None:
        """End the thread; what still waits gets an EngineError. Idempotent."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)

    async def _on_workers(self, method: str, *args: Any) -> list[Any]:
        """What each worker's `method` returned, called between two steps."""
        return await self._call(partial(self._rpc, method, *args))

    async def _call(self, work: Callable[[], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._order(lambda: self._settle(future, work()), future)
        return await future

    def _order(self, work: Callable[[], None], future: asyncio.Future[Any] | None) -> None:
        """Have the stepping thread do `work`; `future` gets an EngineError if the thread ends without settling it."""
        with self._ending:
            if self._failure is not None:
                raise _engine_error(self._failure)
            if future is not None:
                self._unsettled.add(future)
            self._inbox.put(work)

    # From here on, everything runs on the stepping thread.

    def _run(self, start: Callable[[], Any]) -> None:
        """Start vLLM, then obey and step until told to stop. Blocks on the inbox while nothing generates."""
        failure: Exception = RuntimeError("close() was called")
        try:
            self._llm = start()
            self._kv_cache = self._llm.engine_core.engine_core.scheduler.kv_cache_manager
            self._vocab_size = self._llm.model_config.get_vocab_size()
            self._started.set()
            while self._obey():
                self._step()
        # This thread's main: whatever ends it, those who wait must hear of it.
        except Exception as error:
            failure = error
        self._end(failure)
        if self._started.is_set():
            self._llm.engine_core.shutdown()  # the receiver too, or broadcasts would still wait for this actor
        self._started.set()

    def _obey(self) -> bool:
        """Do what was ordered, and wait for more while nothing generates. False is the order to stop."""
        while not self._running or not self._inbox.empty():
            order = self._inbox.get()
            if order is None:
                return False
            order()
        return True

    def _step(self) -> None:
        for output in self._llm.step():
            generation = self._running.pop(output.request_id)
            self._generated_tokens += len(output.outputs[0].token_ids)
            try:
                self._settle(generation.future, self._vllm.completion_of(output.outputs[0]))
            except EngineError as error:  # this request's own
                self._settle(generation.future, error)

    def _add(self, request_id: str, generation: _Generation) -> None:
        # The salt keeps a new request off prefixes that older weights computed.
        prompt = {"type": "token", "prompt_token_ids": generation.tokens, "cache_salt": f"v{self._policy_version}"}
        try:
            self._llm.add_request(request_id, prompt, generation.params)
        except ValueError as error:  # this request is wrong, the engine is not
            self._settle(generation.future, error)
        else:
            self._running[request_id] = generation

    def _abort(self, request_id: str) -> None:
        generation = self._running.pop(request_id, None)
        if generation is not None:  # else it finished while it was cancelled
            self._unsettled.discard(generation.future)
            self._llm.abort_request([request_id])

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = self._llm.collective_rpc(method, args=args)
        return answers

    def _commit(self, policy_version: int) -> float:
        started_s = time.perf_counter()
        self._llm.sleep(level=0, mode="keep")  # vLLM's name for a pause: level 0 frees nothing
        self._rpc("start_weight_update")
        self._rpc("update_weights", {"policy_version": policy_version})
        self._rpc("finish_weight_update")
        self._llm.set_weight_version(str(policy_version))
        if self._kv_policy == "recompute":
            self._llm.reset_prefix_cache(reset_running_requests=True)
        self._policy_version = policy_version
        self._restart_unbegun()
        self._llm.wake_up(tags=["scheduling"])
        return time.perf_counter() - started_s

    def _restart_unbegun(self) -> None:
        """Add anew what has no token yet: all its tokens will be of the new version, so must the KV of its prompt."""
        states = self._llm.output_processor.request_states.values()
        for request_id in [state.external_req_id for state in states if state.detokenizer.num_output_tokens() == 0]:
            self._llm.abort_request([request_id])
            self._add(request_id, self._running.pop(request_id))

    def _settle(self, future: asyncio.Future[T], result: T | Exception) -> None:
        """Give `result` to who awaits `future`, in its own loop."""
        self._unsettled.discard(future)
        with contextlib.suppress(RuntimeError):  # that loop is closed: nobody awaits
            future.get_loop().call_soon_threadsafe(_resolve, future, result)

    def _end(self, failure: Exception) -> None:
        with self._ending:
            self._failure = failure
        self._running.clear()
        for future in list(self._unsettled):
            self._settle(future, _engine_error(failure))


def stop_token_ids(model_path: str) -> list[int]:
    """The tokens that end a turn: those of the tokenizer and of the generation config in the model's folder.

    Raises ValueError where there is none: every generation would run to its limit.
    """
    end = GenerationConfig.from_pretrained(model_path).eos_token_id
    found = {AutoTokenizer.from_pretrained(model_path).eos_token_id, *(end if isinstance(end, list) else [end])}
    found.discard(None)
    if not found:
        raise ValueError(f"`model.path` {model_path} names no end-of-turn token; set eos_token in its tokenizer")
    return sorted(found)


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


def _engine_error(failure: Exception) -> EngineError:
    """A new exception for each who must hear of `failure`: one that is raised many times would grow its traceback."""
    error = EngineError(f"the engine ended: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error


def _resolve(future: asyncio.Future[T], result: T | Exception) -> None:
    if future.done():
        return  # cancelled meanwhile
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
