"""The common part of environments: which episode is running, and how observations are made."""

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError, Observation


@dataclass(kw_only=True, slots=True)
class Begun:
    """An episode that has been started."""

    task: Task
    is_over: bool = False
    total_reward: float = 0.0  # so far, where no snapshot was restored


E = TypeVar("E", bound=Begun)


def opened(text: str, *, rules: str = "", terminated: bool = False) -> Observation:
    """Return the observation of a reset: `rules` as the system message, if there are any, and then the task."""
    system = (Message("system", rules),) if rules else ()
    return Observation(messages=(*system, Message("user", text)), rewards={}, terminated=terminated)


def answered(
    text: str,
    rewards: dict[str, float],
    *,
    role: str = "user",
    valid: bool = True,
    terminated: bool = False,
    truncated: bool = False,
    score: float = 0.0,
) -> Observation:
    """Return an observation of one message. A score of 1 is success, and an end of both kinds is `terminated`."""
    return Observation(
        messages=(Message(role, text),),
        rewards=rewards,
        terminated=terminated,
        truncated=truncated and not terminated,
        valid_action=valid,
        score=score,
        success=score == 1.0,
    )


class EpisodeEnv(Generic[E]):
    """An `Env` that keeps whether an episode is running, without snapshots unless a subclass has them.

    A subclass sets `_episode` in `reset`, and does an action in `_act`.
    """

    replay_only: ClassVar[bool] = True
    _episode: E | None = None

    async def step(self, action: str) -> Observation:
        episode = self._running()
        observation = await self._act(episode, action)
        episode.is_over = observation.done
        episode.total_reward += sum(observation.rewards.values())
        return observation

    async def _act(self, episode: E, action: str) -> Observation:
        raise NotImplementedError

    async def close(self) -> None:
        self._episode = None

    def snapshot(self) -> bytes:
        raise NotImplementedError(f"{type(self).__name__} cannot save its state; replay the actions")

    def restore(self, state: bytes) -> Observation:
        raise NotImplementedError(f"{type(self).__name__} cannot restore a state; replay the actions")

    def admissible(self) -> list[str] | None:
        """Return None, as valid actions cannot be listed; [] after the end. Raises EnvError before a reset."""
        return [] if self._started().is_over else None

    def state_key(self) -> str:
        """Return "", as the package has state that it does not show. Raises EnvError before a reset."""
        self._started()
        return ""

    def expert(self) -> str:
        self._running()
        raise NotImplementedError(f"{type(self).__name__} has no expert; use `slipstream fit sft` for a warm start")

    def _started(self) -> E:
        """Return the episode, running or ended. Raises EnvError before the first reset."""
        if self._episode is None:
            raise EnvError("no episode has begun; call reset first")
        return self._episode

    def _running(self) -> E:
        """Return the running episode. Raises EnvError before the first reset and after the end."""
        episode = self._started()
        if episode.is_over:
            raise EnvError(f"the episode of {episode.task.task_id} is over; call reset first")
        return episode
