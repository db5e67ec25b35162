"""What environments by other people's packages have in common: their states cannot be written down."""

from typing import ClassVar, Generic, Protocol, TypeVar

from common.trajectory import Task
from envhub.env import EnvError, Observation


class Begun(Protocol):
    """An episode that was started."""

    task: Task
    is_over: bool


E = TypeVar("E", bound=Begun)


class ReplayedEnv(Generic[E]):
    """The part of an `Env` that says so, and knows whether an episode is under way. `reset` sets `_episode`."""

    replay_only: ClassVar[bool] = True

    def __init__(self) -> None:
        self._episode: E | None = None

    def snapshot(self) -> bytes:
        raise NotImplementedError("its states cannot be written down; its actions are done again")

    def restore(self, state: bytes) -> Observation:
        raise NotImplementedError("its states cannot be written down; its actions are done again")

    def admissible(self) -> list[str] | None:
        """None: what may be said cannot be listed; none after the end. Raises EnvError before a reset."""
        return [] if self._started().is_over else None

    def state_key(self) -> str:
        """Empty: the package knows of its state what it does not show. Raises EnvError before a reset."""
        self._started()
        return ""

    def expert(self) -> str:
        self._running()
        raise NotImplementedError(f"{type(self).__name__} has no expert; begin with `slipstream sft`")

    def _started(self) -> E:
        """The episode, over or not. Raises EnvError before the first reset."""
        if self._episode is None:
            raise EnvError(f"{type(self).__name__} has no episode; call reset first")
        return self._episode

    def _running(self) -> E:
        """The episode that goes on. Raises EnvError before the first reset and after the end."""
        episode = self._started()
        if episode.is_over:
            raise EnvError(f"the episode of {episode.task.task_id} is over; call reset first")
        return episode
