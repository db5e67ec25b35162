"""Environments that fail, for tests of what becomes of it."""

from pathlib import Path

from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.shop.shop import ShopEnv
from tests.guess import GuessEnv


class FailingEnv(GuessEnv):
    def __init__(self, broken: str) -> None:
        super().__init__()
        self._broken = Path(broken)

    async def reset(self, task: Task) -> Observation:
        if self._broken.exists():
            raise RuntimeError("the database is gone")
        return await super().reset(task)


class UnmadeEnv(GuessEnv):
    def __init__(self) -> None:
        raise OSError("no such database")


class ExpertlessEnv(GuessEnv):
    def expert(self) -> str:
        raise NotImplementedError


class PatchyEnv(ShopEnv):
    """A shop in which one task in `every` does not work."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self._every = every

    async def reset(self, task: Task) -> Observation:
        if task.index % self._every == 0:
            raise EnvError(f"task {task.index} does not work")
        return await super().reset(task)
