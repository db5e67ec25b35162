"""A small environment for tests of whole runs: say the word that is asked for. Even a random policy earns something."""

import asyncio
import random
from pathlib import Path
from typing import ClassVar

from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError, Observation

WORDS = ("black", "blue", "green", "red")
GATE_POLL_S = 0.02


class GuessEnv:
    """`turns` times the same request; a turn earns the share of its words that are the wanted one."""

    replay_only: ClassVar[bool] = True

    def __init__(self, turns: int = 3, step_s: float = 0, gate: str = "", gate_turn: int = 0, worth: float = 1) -> None:
        """Each step takes `step_s`, and from turn `gate_turn` on as long as a file `gate` exists.

        `worth` is what a turn of nothing but the wanted word earns.
        """
        self._num_turns = turns
        self._step_s = step_s
        self._gate = Path(gate) if gate else None
        self._gate_turn = gate_turn
        self._worth = worth
        self._wanted = ""
        self._shares: list[float] = []

    async def reset(self, task: Task) -> Observation:
        self._wanted = random.Random(task.task_id).choice(WORDS)
        self._shares = []
        return Observation(messages=(Message("user", f"say {self._wanted}"),), rewards={})

    async def step(self, action: str) -> Observation:
        if not self._wanted or len(self._shares) >= self._num_turns:
            raise EnvError("no episode is running")
        await asyncio.sleep(self._step_s)
        if self._gate is not None and len(self._shares) >= self._gate_turn:
            while self._gate.exists():  # noqa: ASYNC110 - another process removes it
                await asyncio.sleep(GATE_POLL_S)
        words = action.split()
        self._shares.append(words.count(self._wanted) / max(1, len(words)))
        score = sum(self._shares) / self._num_turns
        return Observation(
            messages=(Message("user", "again"),),
            rewards={"said": self._worth * self._shares[-1]},
            terminated=len(self._shares) == self._num_turns,
            valid_action=bool(words) and set(words) <= set(WORDS),
            score=score,
            success=score > 0.5,
        )

    async def close(self) -> None:
        self._wanted = ""

    def snapshot(self) -> bytes:
        raise NotImplementedError("replay its actions")

    def restore(self, state: bytes) -> Observation:
        raise NotImplementedError("replay its actions")

    def admissible(self) -> list[str] | None:
        return list(WORDS) if self._wanted and len(self._shares) < self._num_turns else []

    def state_key(self) -> str:
        return f"{self._wanted} {self._shares}"

    def expert(self) -> str:
        self._step_s = 0.0  # it plays hundreds of episodes before a run
        return self._wanted


def patience(episode: object) -> float:
    """A part of the reward."""
    return 0.25
