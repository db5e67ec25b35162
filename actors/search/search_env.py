"""The environment of a stretch: it restores the state in which the stretch begins, and saves that in which it ends.

The turns before the stretch are replayed to rebuild the prompt. Their answers come from memory, so that the environment
takes no step for them. An environment without snapshots takes every step again.
"""

from dataclasses import dataclass, replace

from slipstream.actors.episode.answer import check_observation
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import Env, EnvError, Observation, ask


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """An answer of the environment, and what it reports of its state then."""

    action: str  # that was answered; "" for the reset
    observation: Observation
    state_key: str
    admissible: list[str] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """An unfinished episode in an environment that has snapshots."""

    moments: tuple[Moment, ...]  # from the reset on
    snapshot: bytes  # after the last of them


class SearchEnv:
    """An `Env` around another one, for one stretch. It begins in the state `begin`, or at the start.

    `saved` is the state after `num_steps` new steps; None before them, without snapshots, and after the end. `hint` is
    added to the first messages. With `lists_actions`, the admissible actions are remembered too.
    """

    def __init__(self, env: Env, *, begin: Saved | None, num_steps: int, hint: str = "", lists_actions: bool) -> None:
        self._env, self._begin, self._num_steps = env, begin, num_steps
        self._hint, self._lists_actions = hint, lists_actions
        self._moments: list[Moment] = []
        self.saved: Saved | None = None

    @property
    def replay_only(self) -> bool:
        return self._env.replay_only

    async def reset(self, task: Task) -> Observation:
        """Start `task`, or restore the saved state; return the first observation in both cases."""
        if self._begin is None:
            await self._note("", await self._env.reset(task))
        else:
            self.saved, snapshot = self._begin, self._begin.snapshot
            await ask(self._env, lambda: self._env.restore(snapshot))
            if await ask(self._env, self._env.state_key) != self._begin.moments[-1].state_key:
                raise EnvError("a snapshot was restored to another state than it was taken in")
            self._moments = [self._begin.moments[0]]
        return _with_hint(self._moments[0].observation, self._hint)

    async def step(self, action: str) -> Observation:
        """Do `action`, or return the answer that it had before the stretch. Raises EnvError if it is another action."""
        place = len(self._moments)
        earlier = self._begin.moments if self._begin else ()
        if place < len(earlier):
            if earlier[place].action != action:
                raise EnvError(f"turn {place - 1} was read as action {earlier[place].action!r}, and now as {action!r}")
            self._moments.append(earlier[place])
            return earlier[place].observation
        observation = await self._env.step(action)
        await self._note(action, observation)
        self.saved = None
        is_last = place - max(len(earlier), 1) + 1 == self._num_steps
        if is_last and not observation.done and not await ask(self._env, lambda: self._env.replay_only):
            self.saved = Saved(moments=tuple(self._moments), snapshot=await ask(self._env, self._env.snapshot))
        return observation

    async def close(self) -> None:
        await self._env.close()

    def snapshot(self) -> bytes:
        return self._env.snapshot()

    def restore(self, state: bytes) -> Observation:
        return self._env.restore(state)

    def admissible(self) -> list[str] | None:
        """Those after the last answer."""
        return self._moments[-1].admissible

    def state_key(self) -> str:
        """The key after the last answer."""
        return self._moments[-1].state_key

    def expert(self) -> str:
        return self._env.expert()

    async def _note(self, action: str, observation: Observation) -> None:
        check_observation(observation)
        listed = self._lists_actions and not observation.done
        self._moments.append(
            Moment(
                action=action,
                observation=observation,
                state_key="" if observation.done else await ask(self._env, self._env.state_key),
                admissible=await ask(self._env, self._env.admissible) if listed else None,
            )
        )


def _with_hint(first: Observation, hint: str) -> Observation:
    if not hint or not first.messages:  # the caller refuses an observation without messages
        return first
    last = first.messages[-1]
    return replace(first, messages=(*first.messages[:-1], Message(last.role, f"{last.content}\n\n{hint}")))
