"""Serve our environments to OpenEnv's clients: `GenericEnvClient(base_url="http://HOST:PORT/openenv/NAME")`.

`reset(seed=3)` starts train task 3, `reset(seed=3, split="held_out")` held-out task 3; `options` are the environment's.
An action is `{"message": TEXT}`. An observation has the messages' text, and all fields that our own clients get.
"""

import contextlib
import secrets
from typing import Any, Literal

import msgspec

from slipstream.common.process.wire import WireError
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.envhub.remote import env_protocol as protocol
from slipstream.envhub.remote.openenv import CAPACITY_REACHED, EXECUTION_ERROR, VALIDATION_ERROR, Frame, read, written
from slipstream.envhub.serving.env_pool import EnvPool, Episode


class ResetData(msgspec.Struct, kw_only=True, frozen=True):
    seed: int | None = None  # None: a random seed
    split: Literal["train", "held_out"] = "train"
    options: msgspec.Raw = msgspec.Raw(b"{}")


class Action(msgspec.Struct, kw_only=True, frozen=True):
    message: str


class Shown(msgspec.Struct, kw_only=True, frozen=True):
    """The `observation` that OpenEnv's clients get."""

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
    """One client, and its episodes one after another, in one slot of the pool."""

    def __init__(self, pool: EnvPool, env: str, slot: contextlib.AsyncExitStack) -> None:
        self._pool = pool
        self._env = env
        self._slot = slot
        self._episode: Episode | None = None
        self._options = b""
        self._task_id = ""
        self._num_steps = 0

    async def answer(self, message: bytes | str) -> str | None:
        """Return the reply, or None if the client closes the session."""
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
        error = await self._open(bytes(data.options))
        if error is not None:
            return error
        seed = secrets.randbelow(1 << 31) if data.seed is None else data.seed
        task = Task(env=self._env, split=data.split, index=seed)
        self._task_id, self._num_steps = task.task_id, 0
        return _reply(await self._request(protocol.Reset(task=task)), is_start=True)

    async def _open(self, options: bytes) -> str | None:
        """Open an environment with these options, unless one is open. Return an error reply, or None on success."""
        if self._episode is not None and self._options == options:
            return None
        if self._episode is None and self._pool.is_full:
            return _error(CAPACITY_REACHED, f"the server is full: {self._pool.max_episodes} episodes are running")
        await self._free_slot()
        if len(options) > protocol.MAX_OPTIONS_BYTES:
            raise WireError(f"options of {len(options)} bytes, the limit is {protocol.MAX_OPTIONS_BYTES}")
        request = protocol.opening(self._env, read(options, dict[str, Any]))
        self._options = options
        self._episode = await self._slot.enter_async_context(self._pool.episode())
        response = await self._request(request)
        if isinstance(response, protocol.Opened):
            return None
        await self._free_slot()
        return _reply(response, is_start=True)

    async def _step(self, action: str) -> str:
        if self._episode is None:
            return _error(EXECUTION_ERROR, "there is no episode; call reset first")
        self._num_steps += 1
        return _reply(await self._request(protocol.StepEnv(action=action)), is_start=False)

    async def _request(self, request: protocol.EnvRequest) -> protocol.EnvResponse:
        assert self._episode is not None
        response = protocol.decode_response(await self._episode.request(request))
        if isinstance(response, protocol.EnvLost):
            await self._free_slot()
        return response

    async def _free_slot(self) -> None:
        self._episode = None
        await self._slot.aclose()


def _reply(response: protocol.EnvResponse, *, is_start: bool) -> str:
    """Return the frame that answers a reset (`is_start`) or a step."""
    if isinstance(response, protocol.Observed):
        observation = response.observation
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
    why = response.why if isinstance(response, protocol.ErrorResponse) else f"answered {type(response).__name__}"
    return _error(VALIDATION_ERROR if isinstance(response, protocol.InvalidRequest) else EXECUTION_ERROR, why)


def _error(code: str, message: str) -> str:
    return written("error", {"message": message, "code": code})
