"""The engine process: vLLM, stepped by the main thread. `python -m actors.serve_engine FD`, FD being a socket.

A process of its own, so that episodes and engine each have an interpreter: a step of a small model is nearly all
Python. Between two steps it does what its actor ordered: add a request, abort one, commit staged weights. So a commit
falls on a token boundary by construction, and the version of every token is exact.
"""

import logging
import os
import select
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from vllm.v1.engine.llm_engine import LLMEngine

from actors.candidates import num_candidates
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
from actors.vllm_start import engine_name, over, sampling_params, start_vllm, stop_token_ids
from common.wire import encode

log = logging.getLogger(__name__)

STAGE_POLL_S = 0.02
SAY_LOAD_S = 0.02  # at most this long after the KV cache has changed, the actor knows


def main(connection: Connection) -> None:
    """Serve until told to stop, or until the actor is gone. What ends it otherwise, the actor hears."""

    def say(answer: Answer) -> None:
        connection.send_bytes(msgspec.msgpack.encode(answer))

    try:
        settings = msgspec.msgpack.decode(connection.recv_bytes(), type=EngineSettings)
        try:
            stops = stop_token_ids(settings.model_path)
            llm = start_vllm(settings)
        except ValueError as error:
            say(Refused(why=" ".join(str(error).split())))
            return
        say(Started(vocab_size=llm.model_config.get_vocab_size(), engine=engine_name()))
        Server(llm, settings, connection, say=say, stop_token_ids=stops).serve()
        llm.engine_core.shutdown()  # the receiver too, or broadcasts would still wait for this actor
    except (EOFError, ConnectionError):
        log.info("the actor is gone")
    except Exception as error:  # this process's main
        log.exception("the engine process fails")
        say(Died(why=f"{type(error).__name__}: {error}"))


class Server:
    """Obeys orders and steps vLLM, by turns."""

    def __init__(
        self,
        llm: LLMEngine,
        settings: EngineSettings,
        connection: Connection,
        *,
        say: Callable[[Answer], None],
        stop_token_ids: list[int],
    ) -> None:
        self._llm = llm
        self._connection = connection
        self._say = say
        self._stop_token_ids = stop_token_ids
        self._vocab_size = llm.model_config.get_vocab_size()
        self._kv_policy = settings.kv_policy
        self._kv_cache = llm.engine_core.engine_core.scheduler.kv_cache_manager
        self._policy_version = settings.policy_version
        self._running: dict[int, Generate] = {}
        self._staging: Stage | None = None
        self._stage_polled = 0.0
        self._said_kv_use, self._said_at = 0.0, 0.0
        # Not connection.poll(), which makes a selector anew for each call: it is asked before every step.
        self._orders = select.poll()
        self._orders.register(connection.fileno(), select.POLLIN)

    def serve(self) -> None:
        """Step whenever something generates, and sleep while nothing does."""
        while self._obey():
            self._say_load(self._step() if self._running else [])
            self._poll_stage()

    def _obey(self) -> bool:
        """Do what was ordered; wait for an order while there is nothing else to do. False is the order to stop."""
        while self._orders.poll(self._patience_ms()):
            match msgspec.msgpack.decode(self._connection.recv_bytes(), type=Order):
                case Generate() as generate:
                    self._add(generate)
                case Abort(call=call):
                    self._abort(call)
                case Stage() as stage:
                    self._rpc("stage_weights", encode(stage.offer))
                    self._staging = stage
                case Commit(call=call, policy_version=policy_version):
                    self._say(Committed(call=call, pause_s=self._commit(policy_version)))
                case LeaveBroadcasts():
                    self._rpc("leave_broadcasts")
                case Stop():
                    return False
                case unexpected:
                    raise TypeError(f"not an order to a serving engine: {unexpected}")
        return True

    def _patience_ms(self) -> float | None:
        """How long to wait for an order before something else must be done; None is for ever."""
        if self._running or self._kv_cache.usage != self._said_kv_use:
            return 0
        return None if self._staging is None else 1000 * STAGE_POLL_S

    def _step(self) -> list[Ended | Failed]:
        generations = []
        for output in self._llm.step():
            generate = self._running.pop(int(output.request_id))
            generations.append(over(output, num_candidates=self._num_candidates(generate), vocab_size=self._vocab_size))
        return generations

    def _num_candidates(self, generate: Generate) -> int:
        return num_candidates(generate.sampling, vocab_size=self._vocab_size)

    def _say_load(self, generations: list[Ended | Failed]) -> None:
        """Tell the actor which generations are over, and how full the engine is if that has changed."""
        kv_use, now = self._kv_cache.usage, time.monotonic()
        changed = kv_use != self._said_kv_use and (now - self._said_at > SAY_LOAD_S or not self._running)
        if generations or changed:
            self._say(Stepped(over=generations, kv_use=kv_use))
            self._said_kv_use, self._said_at = kv_use, now

    def _poll_stage(self) -> None:
        now = time.monotonic()
        if self._staging is None or now - self._stage_polled < STAGE_POLL_S:
            return
        self._stage_polled = now
        if all(self._rpc("stage_ended")):
            refusals = [refusal for refusal in self._rpc("stage_refusal") if refusal is not None]
            self._say(Staged(call=self._staging.call, refusal=refusals[0] if refusals else None))
            self._staging = None

    def _add(self, generate: Generate) -> None:
        params = sampling_params(
            generate.sampling,
            num_tokens=generate.num_tokens,
            seed=generate.seed,
            stop_token_ids=self._stop_token_ids,
            num_candidates=self._num_candidates(generate),
        )
        # The salt keeps a new request off prefixes that older weights computed.
        prompt = {"type": "token", "prompt_token_ids": generate.tokens, "cache_salt": f"v{self._policy_version}"}
        try:
            self._llm.add_request(str(generate.call), prompt, params)
        except ValueError as error:  # this request is wrong, the engine is not
            self._say_load([Failed(call=generate.call, why=str(error))])
        else:
            self._running[generate.call] = generate

    def _abort(self, call: int) -> None:
        if self._running.pop(call, None) is not None:  # else it ended while it was cancelled
            self._llm.abort_request([str(call)])

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """What each worker's `method` returned."""
        answers: list[Any] = self._llm.collective_rpc(method, args=args)
        return answers

    def _commit(self, policy_version: int) -> float:
        """Return the pause in seconds; running requests go on behind it."""
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
            self._add(self._running.pop(int(request_id)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    main(Connection(int(sys.argv[1])))
    os._exit(0)  # not sys.exit: the interpreter takes seconds to clear vLLM's heap
