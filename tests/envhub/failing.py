"""Environments that fail, for tests of what becomes of it."""

from pathlib import Path

from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import Observation
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
