"""`agent`: an agent of the user's plays the episode, unchanged. Each of its calls to the policy is a turn.

The agent is a function `agent(task, client)`, which may be async, or a command that runs in the sandbox. Its calls go
to an endpoint of the episode's own (`endpoint.py`).
"""

import copy
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.common.process.imported import imported, is_own
from slipstream.common.records.trajectory import StopReason, Task
from slipstream.envhub.agent.command import run_command
from slipstream.envhub.agent.endpoint import Endpoint
from slipstream.envhub.driving import Ending, Generate, Terms
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.own_thread import in_own_thread
from slipstream.envhub.isolation.sandbox import require_sandbox
from slipstream.envhub.package import require_package
from slipstream.envhub.task_seed import task_rng
from slipstream.envhub.user_files import item_of, read_rows, read_tasks_of_rows

FULL_SCORE = 1 - 1e-6
FETCH = "give the path of a .jsonl file or a .parquet file, with one task in each row, or hub:NAME:SPLIT"
TaskRow = dict[str, Any]


class AgentEnv:
    """One episode of an agent. The first component of its reward is the goal, which gives score and success.

    Options: `agent`, a `module:function`, or a command as a list of words; `train`, `held_out`, files of rows with
    a task in each (without `held_out`, one row in eight of `train` is held out; without both, a task is a split, an
    index and a seed); `folder`, a folder that a command sees as /opt/agent, read only.
    """

    def __init__(self, *, agent: str | Sequence[str], train: str = "", held_out: str = "", folder: str = "") -> None:
        """Raises ValueError if an option is wrong, or what it needs is missing."""
        self._command: list[str] = []
        self._function: Callable[..., Any] | None = None
        if isinstance(agent, str) and is_own(agent):
            self._function = imported("env.options.agent", agent, Callable)
            require_package("openai", install="openai")
        else:
            self._command = _words(agent)
            require_sandbox()
        if folder and (not self._command or not Path(folder).is_dir()):
            raise ValueError(
                f"`env.options.folder` must be a directory, for an agent that is a command, got {folder!r}"
            )
        self._folder = _readable(Path(folder)) if folder else None
        if held_out and not train:
            raise ValueError(f"`env.options.train` must be set beside `held_out` {held_out}; {FETCH}")
        self._rows: dict[str, list[TaskRow]] | None = None
        if train:
            self._rows = read_tasks_of_rows(_rows, train, held_out, text=_text, fetch=FETCH)
        self.num_tasks = {split: len(found) for split, found in (self._rows or {}).items()}

    async def play_episode(self, task: Task, terms: Terms, generate: Generate) -> Ending:
        """Let the agent play `task`. Raises EnvError, or what the agent raises."""
        endpoint, row = Endpoint(terms, generate), self.columns(task)
        try:
            if self._function is None:
                await run_command(self._command, row, endpoint, folder=self._folder)
                value = None
            else:
                value = await _called(self._function, row, endpoint)
        except Exception:
            # Most agents do not expect that an answer is refused. The policy itself used up its context or its turns.
            if endpoint.limit is not None and endpoint.reward is None and not endpoint.failure:
                return _ending({"reward": 0.0}, endpoint.limit)
            raise
        if endpoint.failure:
            raise EnvError(endpoint.failure)
        value = endpoint.reward if value is None else value
        if value is None:
            raise EnvError("the agent gave no reward: return a number, or post it to /v1/reward")
        rewards = dict(value) if isinstance(value, Mapping) else {"reward": value}
        return _ending(rewards, endpoint.limit or StopReason.DONE)

    async def close(self) -> None:
        """Do nothing: an episode that ends or is cancelled leaves nothing."""

    def columns(self, task: Task) -> TaskRow:
        """Return what the agent gets: the row of its file, or a split, an index and a seed."""
        if self._rows is not None:
            return copy.deepcopy(item_of(task, self._rows))  # an agent may change it, and other episodes use it
        return {"split": task.split, "index": task.index, "seed": task_rng(task, world="agent").getrandbits(31)}


async def _called(function: Callable[..., Any], row: TaskRow, endpoint: Endpoint) -> Any:
    """What the function returns. One that is not async runs in a thread, so that it blocks no other episode."""
    openai = require_package("openai", install="openai")
    async with endpoint.listening() as url:
        # Neither a proxy nor certificates: the server is this process. The episode has limits of its own for time.
        http = {"trust_env": False, "verify": False}
        settings = {"base_url": url, "api_key": endpoint.key, "timeout": None, "max_retries": 0}
        if inspect.iscoroutinefunction(function):
            async with openai.AsyncOpenAI(**settings, http_client=openai.DefaultAsyncHttpxClient(**http)) as client:
                return await function(row, client)
        with openai.OpenAI(**settings, http_client=openai.DefaultHttpxClient(**http)) as client:
            result = await in_own_thread("an agent", partial(function, row, client))
    if inspect.iscoroutine(result):
        result.close()
        raise EnvError("the agent returned a coroutine; declare the function itself as `async def`")
    return result


def _ending(rewards: dict[str, Any], stop_reason: StopReason) -> Ending:
    """The end of an episode with `rewards`, which are checked like those of any environment."""
    numbers = {name: float(value) if isinstance(value, bool | np.bool_) else value for name, value in rewards.items()}
    goal = next(iter(numbers.values()), 0.0)
    score = min(max(float(goal), 0.0), 1.0) if isinstance(goal, Real) else 0.0
    return Ending(messages=(), rewards=numbers, stop_reason=stop_reason, score=score, success=score >= FULL_SCORE)


def _words(agent: str | Sequence[str]) -> list[str]:
    words = [] if isinstance(agent, str) else list(agent)
    if not words or not all(word and "\0" not in word for word in words):
        raise ValueError(
            "`env.options.agent` must be module:function, or a command as a list of words, such as "
            f"[/usr/bin/python3, /opt/agent/play.py], got {agent!r}"
        )
    return words


def _readable(folder: Path) -> Path:
    """Return the whole path. Raises ValueError if the sandbox could not show it: under root it is another user."""
    path = folder.resolve()
    closed = [str(part) for part in (path, *path.parents) if not part.stat().st_mode & 0o001]
    if os.geteuid() == 0 and (closed or not path.stat().st_mode & 0o004):
        raise ValueError(
            f"`env.options.folder` {folder} must be readable by every user, as root's sandbox runs as another one; "
            f"chmod o+rx {' '.join(closed) or path}"
        )
    return path


def _rows(source: Path | str) -> list[TaskRow]:
    return [row for _, row in read_rows(source)]


def _text(row: TaskRow) -> str:
    return json.dumps(row, sort_keys=True)
