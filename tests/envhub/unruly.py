"""An environment whose actions make it fail, crash or hang."""

import asyncio
import os
import subprocess
import time
from typing import Any

from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError, Observation
from tests.guess import GuessEnv


class UnrulyEnv(GuessEnv):
    async def reset(self, task: Task) -> Observation:
        return Observation(messages=(Message("user", f"pid {os.getpid()}"),), rewards={})

    async def step(self, action: str) -> Any:
        match action:
            case "daemon":
                command = ["sh", "-c", "(setsid sleep 3600 >/dev/null 2>&1 & echo $!)"]
                return said((await asyncio.to_thread(subprocess.check_output, command)).decode())
            case "exit":
                raise SystemExit(3)
            case "crash":
                os.abort()
            case "hang":
                time.sleep(3600)  # noqa: ASYNC251 - it is meant
            case "dawdle":
                await asyncio.sleep(3600)
            case "fail":
                raise EnvError("the database is gone")
            case "refuse":
                raise ValueError("no such thing")
            case "garbage":
                return {"reward": 1}
            case "surrogate":
                return said("\udc00")
            case "flood":
                return said("x" * (9 << 20))
        return said(action)

    def admissible(self) -> Any:
        return [1, 2]

    def expert(self) -> str:
        raise ZeroDivisionError("who knows")


def said(text: str) -> Observation:
    return Observation(messages=(Message("user", text),), rewards={"said": 1})
