"""Our environments for OpenEnv's clients: `GenericEnvClient(base_url="http://HOST:PORT/openenv/NAME")`.

`reset(seed=3)` is train task 3, `reset(seed=3, split="held_out")` a held-out one; `options` are the environment's. An
action is `{"message": TEXT}`; an observation has the messages' text, and what else our own clients are told.
"""

import contextlib
import secrets
from typing import Any, Literal

import msgspec

from common.message import Message
from common.trajectory import Task
from common.wire import WireError
from envhub.remote.env_protocol import (
    MAX_OPTIONS_BYTES,
    Answer,
    Ask,
    EnvLost,
    NoSense,
    Observed,
    Open,
    Opened,
    Refusal,
    Reset,
    Step,
    decode_answer,
)
from envhub.serving.env_pool import EnvPool, Episode
from envhub.remote.openenv import CAPACITY_REACHED, EXECUTION_ERROR, VALIDATION_ERROR, Frame, read, written


class ResetData(msgspec.Struct, kw_only=True, frozen=True):
    seed: int | None = None  # None draws one
    split: Literal["train", "held_out"] = "train"
    options: msgspec.Raw = msgspec.Raw(b"{}")


class Action(msgspec.Struct, kw_only=True, frozen=True):
    message: str


class Shown(msgspec.Struct, kw_only=True, frozen=True):
    """The `observation` that their clients get."""

    text: str
    messages: tuple[Message, ...]
    rewards: dict[str, float]
    valid_action: bool
    truncated: bool
    score: float
    success: bool


SCHEMA = {
    "action": msgspec.json.schema(Action),
    "observation": msgspec.json.schema(Shown),
    "state": {"type": "object", "properties": {"episode_id": {"type": "string"}, "step_count": {"type": "integer"}}},
}


class OpenEnvSession:
    """One client, and its episodes one after the other, in one slot of the pool."""

    def __init__(self, pool: EnvPool, env: str, held: contextlib.AsyncExitStack) -> None:
        self._pool = pool
        self._env = env
        self._held = held
        self._episode: Episode | None = None
        self._options = b""
        self._task_id = ""
        self._num_steps = 0

    async def answer(self, message: bytes | str) -> str | None:
        """What is told; None where the client closes."""
        try:
            frame = read(message, Frame)
            match frame.type:
                case "reset":
                    return await self._reset(read(bytes(frame.data), ResetData))
                case "step":
                    return await self._step(read(bytes(frame.data), Action).message)
                case "state":
                    return written("state", {"episode_id": self._task_id, "step_count": self._num_steps})
                case "close":
                    return None
            return _error("UNKNOWN_TYPE", f"Unknown message type: {frame.type}")
        except WireError as error:
            return _error(VALIDATION_ERROR, str(error))

    async def _reset(self, data: ResetData) -> str:
        refusal = await self._opened(bytes(data.options))
        if refusal is not None:
            return refusal
        seed = secrets.randbelow(1 << 31) if data.seed is None else data.seed
        task = Task(env=self._env, split=data.split, index=seed)
        self._task_id, self._num_steps = task.task_id, 0
        return _told(await self._asked(Reset(task=task)), is_start=True)

    async def _opened(self, options: bytes) -> str | None:
        """Have an environment with these options; why there is none."""
        if self._episode is not None and self._options == options:
            return None
        if self._episode is None and self._pool.is_full:
            return _error(CAPACITY_REACHED, f"{self._pool.max_episodes} episodes are played already")
        await self._let_go()
        if len(options) > MAX_OPTIONS_BYTES:
            return _error(VALIDATION_ERROR, f"options of {len(options)} bytes, the limit is {MAX_OPTIONS_BYTES}")
        packed = msgspec.msgpack.encode(read(options, dict[str, Any]))
        self._options = options
        self._episode = await self._held.enter_async_context(self._pool.episode())
        answer = await self._asked(Open(env=self._env, options=msgspec.Raw(packed)))
        if isinstance(answer, Opened):
            return None
        await self._let_go()
        return _told(answer, is_start=True)

    async def _step(self, action: str) -> str:
        if self._episode is None:
            return _error(EXECUTION_ERROR, "there is no episode; call reset first")
        self._num_steps += 1
        return _told(await self._asked(Step(action=action)), is_start=False)

    async def _asked(self, ask: Ask) -> Answer:
        assert self._episode is not None
        answer = decode_answer(await self._episode.ask(ask))
        if isinstance(answer, EnvLost):
            await self._let_go()
        return answer

    async def _let_go(self) -> None:
        self._episode = None
        await self._held.aclose()


def _told(answer: Answer, *, is_start: bool) -> str:
    if isinstance(answer, Observed):
        observation = answer.observation
        shown = Shown(
            text="\n".join(message.content for message in observation.messages),
            messages=observation.messages,
            rewards=observation.rewards,
            valid_action=observation.valid_action,
            truncated=observation.truncated,
            score=observation.score,
            success=observation.success,
        )
        reward = None if is_start else sum(observation.rewards.values())
        return written("observation", {"observation": shown, "reward": reward, "done": observation.done})
    why = answer.why if isinstance(answer, Refusal) else f"answered {type(answer).__name__}"
    return _error(VALIDATION_ERROR if isinstance(answer, NoSense) else EXECUTION_ERROR, why)


def _error(code: str, message: str) -> str:
    return written("error", {"message": message, "code": code})
