"""One episode of `verifiers`: its requests for tokens, the answers, and its end.

Its events come from the endpoint for tokens and from the process that plays. An episode counts only if both agree: the
turns in the trace, to which the rewards belong, must be the tokens that were sampled here.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from common.trajectory import Sampling, StopReason
from envhub.driving import Asked, Reply
from envhub.env import EnvError

NOTHING_YET = {"verifiers": 0.0}  # rewards come at the end only
FULL_SCORE = 1 - 1e-6  # weights that add up to 1 may differ from 1 by rounding
NEWS_S = 2  # to hear why a request has ended
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRequest:
    """A prompt, and the future of its answer, which is cancelled when the request ends."""

    prompt: list[int]
    answer: asyncio.Future[Reply]


@dataclass(kw_only=True, slots=True)
class Session:
    """The events of an episode, in order."""

    sampling: Sampling
    events: asyncio.Queue[TokenRequest | EpisodeReport | EnvError] = field(default_factory=asyncio.Queue)
    answered: list[list[int]] = field(default_factory=list)
    request: TokenRequest | None = None

    async def answer(self, reply: Reply) -> None:
        """Answer the last request. Raises EnvError if the request has ended: then the episode lacks these tokens."""
        request, self.request = self.request, None
        if request is None or request.answer.done():
            # A process that dies breaks its connections before it is missed: then that is the reason.
            with contextlib.suppress(TimeoutError):
                event = await asyncio.wait_for(self.events.get(), NEWS_S)
                if isinstance(event, EnvError):
                    raise event
            raise EnvError(
                "verifiers did not wait for its answer; a timeout of its configuration is too short for this engine"
            )
        request.answer.set_result(reply)
        self.answered.append(reply.tokens)

    async def next(self) -> Asked:
        """Return the next request, or the end of the episode. Raises EnvError."""
        event = await self.events.get()
        if isinstance(event, EnvError):
            raise event
        if isinstance(event, EpisodeReport):
            return outcome(event, self.answered)
        self.request = event
        return Asked(messages=(), rewards=NOTHING_YET, prompt=event.prompt)

    def close(self) -> None:
        """Cancel all requests that have no answer yet."""
        if self.request is not None:
            self.request.answer.cancel()
        while not self.events.empty():
            event = self.events.get_nowait()
            if isinstance(event, TokenRequest):
                event.answer.cancel()


def outcome(ending: EpisodeReport, answered: Sequence[list[int]]) -> Asked:
    """Return the end as an observation. Raises EnvError if the episode has no valid reward."""
    if not ending.ok and not ending.sampled:
        raise EnvError("; ".join(ending.errors) or f"the episode failed with {ending.stop}")
    if sorted(ending.sampled) != sorted(answered):
        raise EnvError(
            f"its trace has {len(ending.sampled)} turns, which differ from the {len(answered)} sampled ones; "
            f"its errors: {ending.errors}"
        )
    if ending.rejected:
        raise EnvError(f"verifiers would not train {ending.rejected} of its branches; choose another harness")
    if not ending.ok and ending.context_full and answered:
        # The harness reports a failure, so verifiers did not score it. But the policy itself filled its context.
        return Asked(messages=(), rewards=NOTHING_YET, prompt=[], stop_reason=StopReason.MAX_TOKENS)
    if not ending.ok:
        raise EnvError("; ".join(ending.errors) or f"the episode failed with {ending.stop}")
    if ending.stop is not None and ending.stop.endswith("_timeout"):
        raise EnvError(f"a timeout of verifiers ended the episode: {ending.stop}")
    rewards = {name: reward for name, reward in ending.rewards.items() if reward is not None}
    if not rewards or len(rewards) < len(ending.rewards):
        raise EnvError(f"its rewards are {ending.rewards}; a task must have at least one, and a number for each")
    score = min(max(sum(rewards.values()), 0.0), 1.0)
    stop_reason = LIMITS.get(ending.stop or "", StopReason.MAX_TOKENS if ending.context_full else StopReason.DONE)
    return Asked(
        messages=(), rewards=rewards, prompt=[], stop_reason=stop_reason, score=score, success=score >= FULL_SCORE
    )
