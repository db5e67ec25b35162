"""One episode of `verifiers`: its requests for tokens, the answers, and its end.

Both the endpoint for tokens and the process that plays report on it. An episode counts only if they agree: the
turns in the trace, to which the rewards belong, must be the tokens that were sampled here.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from slipstream.common.records.trajectory import Sampling, StopReason
from slipstream.envhub.driving import Ending, Generate, Reply, Request
from slipstream.envhub.env import EnvError

NOTHING = {"verifiers": 0.0}  # for an episode that verifiers did not score
FULL_SCORE = 1 - 1e-6  # weights that add up to 1 may differ from 1 by rounding
LIMITS = {
    "max_turns": StopReason.MAX_TURNS,
    "max_input_tokens": StopReason.MAX_TOKENS,
    "max_output_tokens": StopReason.MAX_TOKENS,
    "max_total_tokens": StopReason.MAX_TOKENS,
}


class EpisodeReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process's report on an episode that is over. With only `errors`, the episode was not played."""

    ended: str
    errors: list[str]
    ok: bool = False
    rewards: dict[str, float | None] = {}
    stop: str | None = None
    context_full: bool = False  # a prompt was longer than the context
    sampled: list[list[int]] = []
    rejected: int = 0  # branches of the trace that verifiers would not train


class Session:
    """One running episode: its requests for tokens, and the report that ends it. Made in a running event loop."""

    def __init__(self, sampling: Sampling, generate: Generate) -> None:
        self.sampling = sampling
        self.answered: list[list[int]] = []
        self._generate = generate
        self._num_given_up = 0  # requests for whose answers verifiers did not wait
        self._report: asyncio.Future[EpisodeReport] = asyncio.get_running_loop().create_future()

    async def answer(self, prompt: list[int], *, has_left: Callable[[], bool]) -> Reply:
        """Return what the policy samples after `prompt`. It counts only if the client has not left meanwhile.

        Raises EnvError if the episode is over.
        """
        try:
            reply = await self._generate(Request(prompt=prompt))
        except asyncio.CancelledError:
            self._num_given_up += 1
            raise
        if has_left():
            self._num_given_up += 1
        else:
            reply.record()
            self.answered.append(reply.tokens)
        return reply

    @property
    def is_over(self) -> bool:
        return self._report.done()

    def end(self, report: EpisodeReport) -> None:
        if not self.is_over:
            self._report.set_result(report)

    def fail(self, error: EnvError) -> None:
        if not self.is_over:
            self._report.set_exception(error)

    async def ending(self) -> Ending:
        """Wait for the end of the episode. Raises EnvError."""
        report = await self._report
        try:
            return outcome(report, self.answered)
        except EnvError as error:
            if not self._num_given_up:
                raise
            raise EnvError(
                f"{error}; verifiers did not wait for {self._num_given_up} answers: a timeout of its configuration is "
                "too short for this engine"
            ) from error


def outcome(ending: EpisodeReport, answered: Sequence[list[int]]) -> Ending:
    """Return the end as an observation. Raises EnvError if the episode has no valid reward."""
    failed = EnvError("; ".join(ending.errors) or f"the episode failed with {ending.stop}")
    if not ending.ok and not ending.sampled:
        raise failed
    if sorted(ending.sampled) != sorted(answered):
        raise EnvError(
            f"its trace has {len(ending.sampled)} turns, which differ from the {len(answered)} sampled ones; "
            f"its errors: {ending.errors}"
        )
    if ending.rejected:
        raise EnvError(f"verifiers would not train {ending.rejected} of its branches; choose another harness")
    if not ending.ok:
        if not (ending.context_full and answered):
            raise failed
        # The harness reports a failure, so verifiers did not score it. But the policy itself filled its context.
        return Ending(messages=(), rewards=NOTHING, stop_reason=StopReason.MAX_TOKENS)
    if ending.stop is not None and ending.stop.endswith("_timeout"):
        raise EnvError(f"a timeout of verifiers ended the episode: {ending.stop}")
    rewards = {name: reward for name, reward in ending.rewards.items() if reward is not None}
    if not rewards or len(rewards) < len(ending.rewards):
        raise EnvError(f"its rewards are {ending.rewards}; a task must have at least one, and a number for each")
    score = min(max(sum(rewards.values()), 0.0), 1.0)
    stop_reason = LIMITS.get(ending.stop or "", StopReason.MAX_TOKENS if ending.context_full else StopReason.DONE)
    return Ending(messages=(), rewards=rewards, stop_reason=stop_reason, score=score, success=score >= FULL_SCORE)
