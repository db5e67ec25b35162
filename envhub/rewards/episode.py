"""A whole episode in readable form, as the parts of a reward get it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from slipstream.common.records.reward_protocol import ScoredEpisode
from slipstream.common.records.trajectory import Task

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeTurn:
    """One reply of the policy, and what the environment made of it."""

    reply: str  # the whole text that the policy wrote
    action: str  # what `env.action_format` read in it
    valid_action: bool
    answer: str  # what the environment answered
    rewards: Mapping[str, float]  # the environment's own, by component
    state_key: str  # of the state in which the action was chosen; "" if unknown
    num_tokens: int  # sampled
    finish_reason: str  # "stop" (the policy ended its turn) or "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A finished episode."""

    task: Task
    columns: Mapping[str, Any]  # what the environment tells of the task; the policy never saw it
    prompt: list[dict[str, str]]  # the first messages, each with role and content
    messages: list[dict[str, str]]  # the whole conversation, from the prompt to the last reply
    ending: list[dict[str, str]]  # the environment's answer to the last reply, which the policy never saw
    turns: list[EpisodeTurn]
    max_turns: int  # `env.max_turns`
    score: float  # in [0, 1]: of the environment, or of the part with `success_from`
    success: bool
    stop_reason: str  # done, max_turns or max_tokens
    completion_ids: Sequence[int]  # the tokens from the first reply to the last
    scored: ScoredEpisode | None = None  # all tokens, for a reward model; None if there are only texts

    @property
    def goal(self) -> float:
        """The sum of the environment's own rewards."""
        return sum(sum(turn.rewards.values()) for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(turn.num_tokens for turn in self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading(Generic[T]):
    """What was read in a judge's answer, and the version of the run's own policy that wrote it; None: another model."""

    value: T
    policy_version: int | None

    def version_under(self, name: str) -> dict[str, float]:
        """The version, by the name that it is recorded under for the part `name`; empty for another model."""
        return {} if self.policy_version is None else {f"{name}_policy_version": float(self.policy_version)}


Values = float | list[float] | Reading[float] | None
"""What a part measures: one number for the episode, one for each turn, or None if the part does not apply."""
