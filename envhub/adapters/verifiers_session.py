"""One episode of `verifiers`: what is asked for in it, what it was answered, and how it ended.

Two sides tell of it, the endpoint that is asked for tokens and the process that plays. An episode counts where they
agree: the turns in the trace, which the rewards are for, must be the tokens that were sampled here.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from common.trajectory import Sampling, StopReason
from envhub.driving import Asked, Reply
from envhub.env import EnvError

NOTHING_YET = {"verifiers": 0.0}  # rewards are told at the end only
FULL_SCORE = 1 - 1e-6  # weights that sum up to 1 do so within rounding
LIMITS = {
    "max_turns": StopReason.MAX_TURNS,
    "max_input_tokens": StopReason.MAX_TOKENS,
    "max_output_tokens": StopReason.MAX_TOKENS,
    "max_total_tokens": StopReason.MAX_TOKENS,
}


class Ending(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the process says of an episode that is over. With nothing but `errors`, it was not played."""

    ended: str
    errors: list[str]
    ok: bool = False
    rewards: dict[str, float | None] = {}
    stop: str | None = None
    context_full: bool = False  # a prompt was longer than the context
    sampled: list[list[int]] = []
    rejected: int = 0  # branches of the trace that verifiers would not train


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A prompt, and where its answer goes; that is cancelled when nobody waits for it any more."""

    prompt: list[int]
    answer: asyncio.Future[Reply]


@dataclass(kw_only=True, slots=True)
class Session:
    """What comes to an episode, in the order that it came."""

    sampling: Sampling
    events: asyncio.Queue[Question | Ending | EnvError] = field(default_factory=asyncio.Queue)
    answered: list[list[int]] = field(default_factory=list)
    question: Question | None = None

    def answer(self, reply: Reply) -> None:
        """Raises EnvError where nobody waits for it: what was sampled is then no part of the episode."""
        question, self.question = self.question, None
        if question is None or question.answer.done():
            raise EnvError("it did not wait for its answer; a timeout of its own is too short for this engine")
        question.answer.set_result(reply)
        self.answered.append(reply.tokens)

    async def next(self) -> Asked:
        """What is asked for next, or how the episode ended. Raises EnvError."""
        event = await self.events.get()
        if isinstance(event, EnvError):
            raise event
        if isinstance(event, Ending):
            return outcome(event, self.answered)
        self.question = event
        return Asked(messages=(), rewards=NOTHING_YET, prompt=event.prompt)

    def close(self) -> None:
        """Nobody answers from now on."""
        if self.question is not None:
            self.question.answer.cancel()
        while not self.events.empty():
            event = self.events.get_nowait()
            if isinstance(event, Question):
                event.answer.cancel()


def outcome(ending: Ending, answered: Sequence[list[int]]) -> Asked:
    """The end as an observation. Raises EnvError for an episode that no reward can be told of."""
    if not ending.ok and not ending.sampled:
        raise EnvError("; ".join(ending.errors) or f"it failed, as {ending.stop}")
    if sorted(ending.sampled) != sorted(answered):
        raise EnvError(
            f"its trace has {len(ending.sampled)} turns, and {len(answered)} were sampled, or others than those; "
            f"its errors: {ending.errors}"
        )
    if ending.rejected:
        raise EnvError(f"verifiers would not train {ending.rejected} of its branches; choose another harness")
    if not ending.ok and ending.context_full and answered:
        # The harness took it for a failure, and so nothing was scored. It was the policy that filled its context.
        return Asked(messages=(), rewards=NOTHING_YET, prompt=[], stop_reason=StopReason.MAX_TOKENS)
    if not ending.ok:
        raise EnvError("; ".join(ending.errors) or f"it failed, as {ending.stop}")
    if ending.stop is not None and ending.stop.endswith("_timeout"):
        raise EnvError(f"a timeout of its own cut it: {ending.stop}")
    rewards = {name: reward for name, reward in ending.rewards.items() if reward is not None}
    if not rewards or len(rewards) < len(ending.rewards):
        raise EnvError(f"its rewards are {ending.rewards}, and a task has at least one and says each")
    score = min(max(sum(rewards.values()), 0.0), 1.0)
    stop_reason = LIMITS.get(ending.stop or "", StopReason.MAX_TOKENS if ending.context_full else StopReason.DONE)
    return Asked(
        messages=(), rewards=rewards, prompt=[], stop_reason=stop_reason, score=score, success=score >= FULL_SCORE
    )  # fmt: skip
