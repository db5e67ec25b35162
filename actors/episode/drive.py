"""Plays an episode whose environment runs the loop itself and requests generations; each generation is a turn.

Nothing is rendered here: the environment sends prompts as tokens. A prompt that continues a sequence of the episode
extends it; any other prompt begins a branch. Sampled tokens that a branch repeats are not trained again: they are
trained where they were sampled. Generations may overlap; each is recorded when it is complete.
"""

import asyncio
import itertools
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Completion, EngineError, Sampler
from slipstream.actors.episode.allowance import Allowance
from slipstream.actors.episode.answer import Boundary, check_observation
from slipstream.actors.episode.episode_record import EpisodeRecord, ReplayMismatch
from slipstream.common.records.trajectory import Trajectory
from slipstream.common.text.codec import end_tokens
from slipstream.envhub.driving import DrivingEnv, Ending, Parse, Reply, Request, Terms
from slipstream.envhub.env import EnvError

OVER = "the episode is over"
POLL_S = 1.0  # between two looks at whether the environment has been idle for too long
REPEAT_S = 10.0  # a generation that was not recorded waits this long for those that were
END_S = 2.0  # time for an environment to end after it was cancelled


async def drive(
    record: EpisodeRecord,
    *,
    env: DrivingEnv,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    allowance: Allowance,
    parse: Parse | None,
) -> Trajectory:
    """Play one episode to its end. The generations that `record` has already are answered from it.

    Raises EnvError, ReplayMismatch, and the errors of `sampler`.
    """
    calls, timeout_s = Calls(record, sampler), allowance.step_timeout_s
    terms = Terms(
        tokenizer=tokenizer,
        max_tokens=allowance.max_tokens,
        max_turns=allowance.max_turns,
        sampling=record.attempt.sampling,
        end_tokens=end_tokens(tokenizer),
        started_at_s=record.started_at_s,
        parse=parse,
    )
    playing = asyncio.create_task(_ending(env, terms, calls))
    ends: set[asyncio.Future[Any]] = {playing, calls.failed}
    try:
        while not playing.done():
            left_s = calls.idle_left_s(timeout_s)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=min(left_s, POLL_S))
            if calls.failed.done():
                calls.failed.result()
            if calls.idle_left_s(timeout_s) <= 0 and not playing.done():
                raise calls.unrepeated() or EnvError(
                    f"it neither requested a generation nor ended within {timeout_s} s"
                )
        ending = playing.result()
    finally:
        calls.end()
        playing.cancel()
        await asyncio.wait({playing}, timeout=END_S)
        if playing.done() and not playing.cancelled():
            playing.exception()  # else asyncio would log it: the episode may have failed for another reason
    if (mismatch := calls.unrepeated()) is not None:
        raise mismatch
    if not record.turns:
        raise EnvError("the episode ended before any generation was complete")
    record.columns = env.columns(calls.task)
    record.end(ending, env_s=calls.idle_s)
    return record.trajectory(ending.stop_reason)


async def _ending(env: DrivingEnv, terms: Terms, calls: "Calls") -> Ending:
    """The end of the episode, checked. Raises EnvError for everything that goes wrong in the environment."""
    with Boundary():
        ending = await env.play_episode(calls.task, terms, calls.generate)
        check_observation(ending)
        if not isinstance(ending, Ending) or not ending.rewards:
            raise EnvError("the episode ended without a reward; a reward of 0 must be given too")
        return ending


class Calls:
    """The generations of one episode: sampled, or repeated from the record of a preempted actor."""

    def __init__(self, record: EpisodeRecord, sampler: Sampler) -> None:
        self.task = record.attempt.task
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._record = record
        self._sampler = sampler
        # Those that were not repeated yet, each with its prompt.
        self._recorded = [(record.prompt_before(turn.start), record.reply(turn)) for turn in record.turns]
        self._all_repeated = asyncio.Event()
        self._numbers = itertools.count(len(record.turns))
        self._running: set[asyncio.Task[Completion]] = set()
        self._num_waiting = 0  # for recorded generations to be repeated
        self._is_over = False
        self._time_s = asyncio.get_running_loop().time
        self._idle_since_s = self._time_s()

    async def generate(self, request: Request) -> Reply:
        """Sample an answer. Raises EnvError if the episode cannot continue; `failed` has the reason."""
        if self._recorded:
            for number, (prompt, reply) in enumerate(self._recorded):
                if prompt == request.prompt:
                    del self._recorded[number]
                    self._idle_since_s = self._time_s()
                    if not self._recorded:
                        self._all_repeated.set()
                    await self._is_valid(request, reply.tokens)
                    return reply
            # Generations overlap, so this one may have been unfinished when the others were recorded.
            self._num_waiting += 1
            try:
                await self._all_repeated.wait()
            finally:
                self._num_waiting -= 1
        idle_s = self.idle_s
        sampling = asyncio.create_task(self._sample(request))
        self._running.add(sampling)
        started_s = self._time_s()
        try:
            completion = await sampling
        except asyncio.CancelledError:
            sampling.cancel()
            if self._is_over:
                raise EnvError(OVER) from None
            raise
        finally:
            self._running.discard(sampling)
            self._idle_since_s = self._time_s()
        generate_s = self._idle_since_s - started_s
        is_valid = await self._is_valid(request, completion.tokens)

        def record() -> None:
            if self._is_over:
                raise EnvError(OVER)
            self._record.add_call(
                request.prompt, completion, valid_action=is_valid, generate_s=generate_s, env_s=idle_s
            )

        return Reply(
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            record=record,
        )

    def end(self) -> None:
        """Abort what is running; nothing is recorded from now on."""
        self._is_over = True
        self._all_repeated.set()
        self.failed.cancel()
        for sampling in self._running:
            sampling.cancel()

    async def _sample(self, request: Request) -> Completion:
        if self._is_over:
            raise EnvError(OVER)
        attempt = self._record.attempt
        sampling = attempt.sampling
        if request.max_tokens is not None:
            fewer = min(max(request.max_tokens, 1), sampling.max_turn_tokens)
            sampling = msgspec.structs.replace(sampling, max_turn_tokens=fewer)
        try:
            completion = await self._sampler.generate(
                request.prompt, sampling, seed=attempt.turn_seed(next(self._numbers))
            )
        except EngineError as error:
            raise self._failure(error) from error
        except ValueError as error:
            invalid = EnvError(f"it requested a generation from an invalid prompt: {error}")
            raise self._failure(invalid) from error
        if request.keep is not None and (num_kept := request.keep(completion.tokens)) < len(completion.tokens):
            return completion.first(max(num_kept, 1), finish_reason="stop")
        return completion

    async def _is_valid(self, request: Request, tokens: list[int]) -> bool:
        """Have the answer read, and return whether its action is valid. Raises EnvError."""
        try:
            return request.read is None or await request.read(tokens)
        except EngineError as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> EnvError:
        """End the episode with `error`, and return what its environment gets."""
        if not self.failed.done():
            self.failed.set_exception(error)
        return EnvError(OVER)

    @property
    def idle_s(self) -> float:
        """Seconds since the last generation ended, in which none was running."""
        return 0.0 if self._running else self._time_s() - self._idle_since_s

    def idle_left_s(self, timeout_s: float) -> float:
        """Seconds until the environment has been idle for too long."""
        return (min(timeout_s, REPEAT_S) if self._num_waiting else timeout_s) - self.idle_s

    def unrepeated(self) -> ReplayMismatch | None:
        """The error for recorded generations that were not requested again; None if there are none."""
        if not self._recorded:
            return None
        return ReplayMismatch(
            f"{len(self._recorded)} of its {len(self._record.turns)} recorded prompts were not sent again"
        )
