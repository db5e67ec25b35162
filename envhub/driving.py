"""The interface of an environment that runs the whole episode itself and requests tokens.

The other kind is in envhub/env.py: it gets one action as text and returns an observation. An environment of this kind
keeps and renders the conversation itself, or has a program of the user's do so. So its prompts are tokens, and sampled
answers go back as tokens. It may request several at a time. Both kinds return rewards and, separately, a score. In
both, a failure is an EnvError, never a reward of 0.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from slipstream.common.records.tool_call import ParsedAnswer
from slipstream.common.records.trajectory import Sampling, StopReason, Task
from slipstream.envhub.env import Observation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Parse(Protocol):
    """Divides an answer into reasoning, content and tool calls."""

    async def __call__(
        self, text: str, *, tokens: list[int], prompt: list[int], tools: list[dict[str, Any]]
    ) -> ParsedAnswer:
        """Divide `text`, the part of the sampled `tokens` that is shown; `tools` are in OpenAI's format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The settings of an episode, which the environment must respect."""

    tokenizer: PreTrainedTokenizerBase  # of the policy, with its chat template
    max_tokens: int  # of a prompt plus its answer
    max_turns: int
    sampling: Sampling
    end_tokens: frozenset[int]  # tokens that end a turn
    started_at_s: float  # of the episode, also of one that another actor began: prompts with a date must not change
    parse: Parse | None = None  # None: answers are not parsed


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt that the policy shall continue."""

    prompt: list[int]
    max_tokens: int | None = None  # of the answer, if fewer than the run's `sampling.max_turn_tokens`
    # How many of the sampled tokens belong to the answer; the others are treated as never sampled. Whether the answer
    # ends after a token must depend on this token and those before it only: else the policy that is trained is not
    # the one that sampled. None keeps all.
    keep: Callable[[list[int]], int] | None = None
    # Reads an answer before it is recorded, also one that is repeated; returns whether its action is valid.
    read: Callable[[list[int]], Awaitable[bool]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The tokens that the policy sampled after a prompt."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" or "length"
    record: Callable[[], None] = lambda: None  # raises EnvError if the episode is over; no effect on a repeated answer


Generate = Callable[[Request], Awaitable[Reply]]
"""Samples an answer, which `Reply.record` records unless its client has left. It may be awaited several times at once.
Cancelling it aborts the request. Raises EnvError when the episode cannot continue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending(Observation):
    """The rewards of a whole episode, at least one, its score, and the reason for its end."""

    stop_reason: StopReason


@runtime_checkable
class DrivingEnv(Protocol):
    """An environment that runs whole episodes itself, one at a time."""

    async def play_episode(self, task: Task, terms: Terms, generate: Generate) -> Ending:
        """Play `task` to its end. The same answers to the same requests should lead to the same next requests.

        Then another actor can continue the episode of an actor that was preempted. Raises EnvError, or anything else,
        if the episode has no valid reward.
        """

    def columns(self, task: Task) -> Mapping[str, Any]:
        """Return the columns of `task` for the parts of `env.rewards`; the policy never sees them."""

    async def close(self) -> None:
        """Free every resource. Idempotent."""
