"""The engine process: its main thread steps vLLM. `python -m slipstream.actors.engine.serve_engine FD`, FD a socket.

It is a separate process, so that episodes and engine each have their own interpreter: a step of a small model is nearly
all Python. Between two steps it executes the actor's orders: add a request, abort one, commit staged weights. So a
commit always happens at a token boundary, and the version of every token is exact.

On a GPU vLLM computes one batch while this process prepares the next: between two steps a batch is in flight. A commit
first collects it, under the version that computed it.
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

from slipstream.actors.engine import orders
from slipstream.actors.engine.candidates import num_candidates
from slipstream.actors.engine.version_trial import Trial, refused
from slipstream.actors.engine.vllm_parsers import AnswerParser
from slipstream.actors.engine.vllm_start import (
    engine_name,
    over,
    probe_params,
    prompt_logprobs,
    sampling_params,
    start_vllm,
    stop_token_ids,
)
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.wire import encode
from slipstream.common.records.message import valid_text
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.common.transfer.probe import Probe, differences, mismatch

log = logging.getLogger(__name__)

PROBE = "probe"  # the id of the request that scores a version's probe; those of generations are numbers
STAGE_POLL_S = 0.005
REPORT_LOAD_S = 0.02  # the longest delay before the actor learns that the KV cache has changed
REPORT_RUNNING_S = 0.1  # the longest time, plus one step, without the number of sampled tokens
REPORT_ALIVE_S = 1.0  # the longest time, plus one step, without a message: the actor treats silence as a hang


def main(connection: Connection) -> None:
    """Serve until the order to stop or until the actor is gone. Any other end is reported to the actor."""

    def reply(answer: orders.Answer) -> None:
        connection.send_bytes(msgspec.msgpack.encode(answer))

    try:
        settings = msgspec.msgpack.decode(connection.recv_bytes(), type=orders.EngineSettings)
        try:
            stops = stop_token_ids(settings.model_path)
            parser = answer_parser(settings)  # first: a wrong name is found before the model is loaded
            llm = start_vllm(settings)
        except ValueError as error:
            reply(orders.Refused(why=" ".join(str(error).split())))
            return
        reply(orders.Started(vocab_size=llm.model_config.get_vocab_size(), engine=engine_name()))
        Server(llm, settings, connection, reply=reply, stop_token_ids=stops, parser=parser).serve()
        llm.engine_core.shutdown()  # this also closes the receiver; otherwise broadcasts would wait for this actor
    except (EOFError, ConnectionError):
        log.info("the actor is gone")
    except Exception as error:  # the main function of this process
        log.exception("the engine process failed")
        reply(orders.Died(why=valid_text(f"{type(error).__name__}: {error}")))


def answer_parser(settings: orders.EngineSettings) -> AnswerParser | None:
    """The parser of answers, if the run has one. Raises ValueError for names that vLLM does not know."""
    if not settings.model.tool_parser and not settings.model.reasoning_parser:
        return None
    return AnswerParser(load_tokenizer(settings.model_path), settings.model)


class Server:
    """Executes orders and steps vLLM in turn."""

    def __init__(
        self,
        llm: LLMEngine,
        settings: orders.EngineSettings,
        connection: Connection,
        *,
        reply: Callable[[orders.Answer], None],
        stop_token_ids: list[int],
        parser: AnswerParser | None,
    ) -> None:
        self._llm = llm
        self._connection = connection
        self._reply = reply
        self._stop_token_ids = stop_token_ids
        self._parser = parser
        self._vocab_size = llm.model_config.get_vocab_size()
        self._kv_policy = settings.actors.kv_policy
        self._core = llm.engine_core.engine_core
        self._kv_cache = self._core.scheduler.kv_cache_manager
        self._policy_version = settings.policy_version
        self._num_switches = 0  # of weights, forth and back
        self._running: dict[int, orders.Generate] = {}
        self._probe: Probe | None = None  # of the version that was staged last
        self._trial: Trial | None = None  # of the version that was committed last
        self._scores: list[float] = []  # of the probe of the version that serves
        self._staging: orders.StageWeights | None = None
        self._preparing = False  # the staged weights have arrived
        self._stage_polled = 0.0
        self._reported_kv_use, self._reported_at = 0.0, 0.0
        # Not connection.poll(): it creates a new selector for each call, and this runs before every step.
        self._orders = select.poll()
        self._orders.register(connection.fileno(), select.POLLIN)

    def serve(self) -> None:
        """Step while requests are running, otherwise sleep. Report the load every REPORT_ALIVE_S."""
        while self._execute_orders():
            self._report_load(self._step() if self._busy() else [])
            self._poll_stage()

    def _execute_orders(self) -> bool:
        """Execute all orders that have arrived, waiting a little if the engine is idle. Return False for a Stop."""
        while self._orders.poll(self._patience_ms()):
            match msgspec.msgpack.decode(self._connection.recv_bytes(), type=orders.Order):
                case orders.Generate() as generate:
                    self._add(generate)
                case orders.Abort(call=call):
                    self._abort(call)
                case orders.Parse() as parse:
                    assert self._parser is not None  # the actor orders nothing else
                    self._reply(orders.Parsed(call=parse.call, answer=self._parser.parsed(parse)))
                case orders.StageWeights() as stage:
                    self._rpc("stage", encode(stage.offer))
                    self._staging, self._preparing = stage, False
                    self._probe = stage.offer.manifest.probe
                case orders.Commit() as commit:
                    self._try(commit)
                case orders.LeaveBroadcasts():
                    self._rpc("leave_broadcasts")
                case orders.Stop():
                    return False
                case unexpected:
                    raise TypeError(f"expected an order to a serving engine, got {unexpected}")
        return True

    def _patience_ms(self) -> float:
        """How long to wait for an order before the next step or report."""
        if self._busy() or self._kv_cache.usage != self._reported_kv_use:
            return 0
        return 1000 * (REPORT_ALIVE_S if self._staging is None else STAGE_POLL_S)

    def _busy(self) -> bool:
        """Whether vLLM has something to compute, or to return."""
        return bool(self._running or self._trial or self._core.batch_queue)

    def _step(self) -> list[orders.Ended | orders.Failed]:
        """Step vLLM; return the generations that ended. While a version is on trial they are kept back."""
        generations, scores = list[orders.Ended | orders.Failed](), None
        for output in self._llm.step():
            if output.request_id == PROBE:
                scores = prompt_logprobs(output)
                continue
            generate = self._running.pop(int(output.request_id))
            ended = over(output, num_candidates=self._num_candidates(generate), vocab_size=self._vocab_size)
            if self._trial:
                self._trial.kept_back[generate.call] = (generate, ended)
            else:
                generations.append(ended)
        return generations if scores is None else self._judge(scores)

    def _num_candidates(self, generate: orders.Generate) -> int:
        return num_candidates(generate.sampling, vocab_size=self._vocab_size)

    def _report_load(self, generations: list[orders.Ended | orders.Failed]) -> None:
        """Send the ended generations and the load; if there are none, only after a change or after REPORT_ALIVE_S."""
        kv_use, now = self._kv_cache.usage, time.monotonic()
        elapsed_s = now - self._reported_at
        changed = kv_use != self._reported_kv_use and (elapsed_s > REPORT_LOAD_S or not self._running)
        if generations or changed or elapsed_s > (REPORT_RUNNING_S if self._running else REPORT_ALIVE_S):
            states = self._llm.output_processor.request_states.values()
            num_tokens = sum(state.detokenizer.num_output_tokens() for state in states)
            self._reply(orders.Stepped(over=generations, kv_use=kv_use, running_tokens=num_tokens))
            self._reported_kv_use, self._reported_at = kv_use, now

    def _poll_stage(self) -> None:
        now = time.monotonic()
        if self._staging is None or now - self._stage_polled < STAGE_POLL_S:
            return
        self._stage_polled = now
        if not all(self._rpc("ended")):
            return
        refusals = [refusal for refusal in self._rpc("refusal") if refusal is not None]
        if not refusals and not self._preparing:
            first, *_ = self._rpc("shared_path")
            self._rpc("prepare", first)
            self._preparing = True
            return
        why, unfit = refusals[0] if refusals else (None, False)
        self._reply(orders.Staged(call=self._staging.call, refusal=why, unfit=unfit))
        self._staging = None

    def _add(self, generate: orders.Generate) -> None:
        params = sampling_params(
            generate, stop_token_ids=self._stop_token_ids, num_candidates=self._num_candidates(generate)
        )
        try:
            self._llm.add_request(str(generate.call), self._prompt(generate.tokens), params)
        except ValueError as error:  # only this request is wrong
            self._report_load([orders.Failed(call=generate.call, why=valid_text(str(error)))])
        else:
            self._running[generate.call] = generate

    def _prompt(self, tokens: list[int]) -> dict[str, Any]:
        # The salt prevents that a new request uses cached prefixes that other weights computed.
        return {"type": "token", "prompt_token_ids": tokens, "cache_salt": f"w{self._num_switches}"}

    def _abort(self, call: int) -> None:
        if self._trial:
            self._trial.kept_back.pop(call, None)
        if self._running.pop(call, None) is not None:  # otherwise it has ended meanwhile
            self._llm.abort_request([str(call)])

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call `method` of every worker's StagedTransferEngine; return the results."""
        answers: list[Any] = self._llm.collective_rpc("transfer", args=(method, *args))
        return answers

    def _try(self, commit: orders.Commit) -> None:
        """Switch to the staged weights, and have their probe scored beside the running requests, in the next step."""
        former = self._policy_version
        pause_s = self._commit(commit.policy_version)
        if self._probe is None:
            self._rpc("keep_or_revert", False)
            self._reply(orders.Committed(call=commit.call, pause_s=pause_s))
            return
        self._trial = Trial(commit=commit, probe=self._probe, pause_s=pause_s, former_version=former)
        self._llm.add_request(PROBE, self._prompt(self._probe.tokens), probe_params())

    def _judge(self, scores: list[float]) -> list[orders.Ended | orders.Failed]:
        """End the trial of the new weights with the scores of their probe; return the generations kept back for it."""
        assert self._trial is not None
        trial, nats = self._trial, differences(self._trial.probe.logprobs, scores)
        why = mismatch(trial.probe, scores, former=self._scores)
        if why is not None:
            self._refuse(why)
            return []
        version, mean, worst = trial.commit.policy_version, sum(nats) / len(nats), max(nats)
        log.info("version %d passed its probe: %.2g nats a token, %.2g at most", version, mean, worst)
        self._trial, self._scores = None, scores
        self._rpc("keep_or_revert", False)
        self._reply(orders.Committed(call=trial.commit.call, pause_s=trial.pause_s))
        return [ended for _, ended in trial.kept_back.values()]

    def _refuse(self, why: str) -> None:
        """Serve the weights before the trial again, and report why."""
        assert self._trial is not None
        self._pause()  # while the trial keeps back what ends
        trial, self._trial = self._trial, None
        untouched = sorted({name for names in self._rpc("untouched") for name in names})
        refusal, reverted = refused(trial, why, untouched=untouched), self._revert(trial)
        log.error("%s", refusal)
        self._reply(orders.Committed(call=trial.commit.call, pause_s=trial.pause_s, refusal=refusal, reverted=reverted))

    def _commit(self, policy_version: int) -> float:
        """Switch to the staged weights; return the pause in seconds. Running requests continue afterwards."""
        started_s = time.perf_counter()
        self._report_load(self._pause())
        self._llm.collective_rpc("start_weight_update")
        self._llm.collective_rpc("update_weights", args=({"policy_version": policy_version},))
        self._llm.collective_rpc("finish_weight_update")
        self._serve_as(policy_version)
        if self._kv_policy == "recompute":
            self._llm.reset_prefix_cache(reset_running_requests=True)
        states = self._llm.output_processor.request_states.values()
        # The new version samples all tokens of requests without a token, and must compute their KV.
        self._restart([int(state.external_req_id) for state in states if not state.detokenizer.num_output_tokens()])
        self._llm.wake_up(tags=["scheduling"])
        return time.perf_counter() - started_s

    def _pause(self) -> list[orders.Ended | orders.Failed]:
        """Schedule nothing more, and wait for the batch in flight; return the generations that ended with it."""
        self._llm.sleep(level=0, mode="keep")  # vLLM's way to pause: level 0 frees no memory
        ended = list[orders.Ended | orders.Failed]()
        while self._core.batch_queue:
            ended += self._step()
        return ended

    def _revert(self, trial: Trial) -> bool:
        """Serve the weights before again, and repeat every generation that has tokens of the refused ones.

        If they are gone, return False: then no generation leaves this engine any more. vLLM must be paused.
        """
        if not all(self._rpc("keep_or_revert", True)):
            self._running.clear()
            return False
        self._serve_as(trial.former_version)
        self._running |= {call: generate for call, (generate, _) in trial.kept_back.items()}
        self._restart(list(self._running))
        self._llm.wake_up(tags=["scheduling"])
        return True

    def _serve_as(self, policy_version: int) -> None:
        self._llm.set_weight_version(str(policy_version))
        self._policy_version = policy_version
        self._num_switches += 1

    def _restart(self, calls: list[int]) -> None:
        """Begin these generations from their prompts."""
        for call in calls:
            self._llm.abort_request([str(call)])
            self._add(self._running.pop(call))


if __name__ == "__main__":
    log_to_stderr()
    main(Connection(int(sys.argv[1])))
    os._exit(0)  # not sys.exit: the interpreter takes seconds to free vLLM's memory
