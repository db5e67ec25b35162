"""The interface of an environment: `reset(task)` and `step(action)`; the rest has defaults.

Observations are messages. Rewards are per turn and named. A failure is an exception, never a reward of 0.
The same task gives the same start on every machine, so that all members of a group attempt the same problem. The same
actions then give the same answers, so that another actor can continue the episode of an actor that was preempted. It
replays the actions and compares each answer with the record. If one differs, it starts the episode again.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task

R = TypeVar("R")


class EnvError(RuntimeError):
    """The environment itself failed; the episode is redone and never trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The answer of the environment to `reset` or `step`."""

    messages: tuple[Message, ...]
    rewards: dict[str, float]  # of this turn, by component; empty only after reset
    terminated: bool = False  # the task has ended
    truncated: bool = False  # a limit of the environment was reached
    valid_action: bool = True  # the environment understood the action
    score: float = 0.0  # the task's own measure so far, in [0, 1], without reward shaping
    success: bool = False
    # After reset: of the task, for the parts of `env.rewards`. The policy never sees them.
    columns: Mapping[str, Any] = field(default_factory=dict)
    # After reset: the actions as functions in OpenAI's format, for `env.action_format` tools. A call is then given to
    # `step` as the JSON object {"name": ..., "arguments": {...}}. None: actions are texts.
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Env(Protocol):
    """One environment with one episode at a time. Made by `cls(**options)`; each `reset` starts a new episode."""

    @property
    def replay_only(self) -> bool:
        """True if `snapshot` and `restore` do not work, so that a state can only be reached by replaying its actions.

        A class variable in all environments but those that run on a server; by default whether those two are missing.
        """
        return type(self).restore is Env.restore

    async def reset(self, task: Task) -> Observation:
        """Start `task` and return its system and user messages, which never contain the answer.

        Raises ValueError if the task does not exist, EnvError if it cannot be started.
        """

    async def step(self, action: str) -> Observation:
        """Do `action`. An invalid action changes nothing and returns an observation; it is not an error.

        Raises EnvError if the environment fails, before the first reset, and after the end of the episode.
        """

    async def close(self) -> None:
        """Free every resource. Idempotent."""

    def snapshot(self) -> bytes:
        """Return the state, for `restore`. Raises NotImplementedError if `replay_only`."""
        raise NotImplementedError("it has no snapshots")

    def restore(self, state: bytes) -> Observation:
        """Return to a snapshot, taken from this instance or another, and return the observation at that point.

        Raises ValueError if the bytes are not a snapshot of such an environment, and then changes nothing. Raises
        NotImplementedError if `replay_only`.
        """
        raise NotImplementedError("it has no snapshots")

    def admissible(self) -> list[str] | None:
        """Return the valid actions: an empty list after the end, None if they cannot be listed."""
        return None

    def state_key(self) -> str:
        """Return a key that is equal for equal states of a task, or "" if states cannot be compared.

        It contains no step counter: the path to a state does not matter.
        """
        return ""

    def expert(self) -> str:
        """Return a good next action, for warm starts. It may use the answer. Raises NotImplementedError without one."""
        raise NotImplementedError("it has no expert")


async def ask(env: Env, question: Callable[[], R]) -> R:
    """Return `question()`, a call of a method of `env` that is not async.

    The class of a client has `waits_for_server = True`. Such a call then runs in a thread, so that it does not block
    other episodes.
    """
    return await asyncio.to_thread(question) if getattr(env, "waits_for_server", False) else question()
