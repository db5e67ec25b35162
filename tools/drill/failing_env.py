"""The environment of a drill wraps another one. An episode of it fails in the way that a file orders.

An order is carried out by one episode: whoever renames the file first.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Env, Observation

HUGE_CHARS = 1 << 28
TAKEN = ".taken"


class TroubledEnv:
    """It behaves as `make_env(name, options)` until the folder `orders` has a file named as one of TROUBLES."""

    def __init__(self, name: str, options: Mapping[str, Any], orders: str) -> None:
        self._env: Env = make_env(name, options)
        self._orders = Path(orders)

    @property
    def replay_only(self) -> bool:
        return self._env.replay_only

    async def reset(self, task: Task) -> Observation:
        return await self._env.reset(task)

    async def step(self, action: str) -> Observation:
        for trouble in TROUBLES:
            if self._takes(trouble):
                return await TROUBLES[trouble]()
        return await self._env.step(action)

    async def close(self) -> None:
        await self._env.close()

    def snapshot(self) -> bytes:
        return self._env.snapshot()

    def restore(self, state: bytes) -> Observation:
        return self._env.restore(state)

    def admissible(self) -> list[str] | None:
        return self._env.admissible()

    def state_key(self) -> str:
        return self._env.state_key()

    def expert(self) -> str:
        return self._env.expert()

    def _takes(self, trouble: str) -> bool:
        order = self._orders / trouble
        if not order.exists():
            return False
        try:
            order.rename(order.with_name(trouble + TAKEN))
        except FileNotFoundError:  # another episode was first
            return False
        return True


async def _raises() -> Observation:
    raise RuntimeError("the database is gone")


async def _raises_base() -> Observation:
    raise SystemExit("the environment wants to leave")


async def _interrupts() -> Observation:
    raise KeyboardInterrupt


async def _blocks() -> Observation:
    time.sleep(3600)  # noqa: ASYNC251 - it is meant
    raise AssertionError("no step waits for so long")


async def _hangs() -> Observation:
    await asyncio.sleep(3600)
    raise AssertionError("no step waits for so long")


async def _ends_the_process() -> Observation:
    os._exit(7)


async def _says_garbage() -> Any:
    return {"observation": b"\xff\xfe"}


async def _says_nan() -> Observation:
    return Observation(messages=(Message("user", "?"),), rewards={"reply": float("nan")})


async def _says_too_much() -> Observation:
    return Observation(messages=(Message("user", "x" * HUGE_CHARS),), rewards={"reply": 0.0})


# Each is a failure of the environment, but for the two that take the whole actor with them.
TROUBLES = {
    "raises": _raises,
    "raises SystemExit": _raises_base,
    "raises KeyboardInterrupt": _interrupts,
    "blocks": _blocks,
    "hangs": _hangs,
    "ends the process": _ends_the_process,
    "says garbage": _says_garbage,
    "says NaN": _says_nan,
    "says too much": _says_too_much,
}
DEADLY = ("blocks", "ends the process")
