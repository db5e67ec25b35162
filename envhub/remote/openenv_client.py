"""`openenv`: an environment that an OpenEnv server (https://github.com/meta-pytorch/OpenEnv) runs, as of 0.3.

Messages are JSON over a WebSocket `/ws`; one connection is one session:

    {"type": "reset", "data": {"seed": 3}}         -> {"type": "observation", "data": {"observation", "reward", "done"}}
    {"type": "step", "data": {ACTION'S FIELDS}}    -> the same
    an invalid request                             -> {"type": "error", "data": {"message", "code"}}

A field that may have any shape stays JSON here, because decoding it may take many times its size in memory.
"""

import asyncio
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.message import valid_text
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.env_options import check_url
from slipstream.envhub.episode_env import Begun, EpisodeEnv, answered, opened
from slipstream.envhub.remote.client_connection import SerialCalls, WebSocketConnection, connect, within
from slipstream.envhub.remote.env_secret import headers_with, read_secret
from slipstream.envhub.task_seed import task_rng

OPEN_S = 60.0  # time to reach the server and to get a session there
ANSWER_S = 120.0
RETRY_S = 0.5
MAX_MESSAGE_BYTES = 8 << 20
CAPACITY_REACHED = "CAPACITY_REACHED"

T = TypeVar("T")


class Frame(msgspec.Struct, kw_only=True, frozen=True):
    """A message from the server."""

    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


class ObservationData(msgspec.Struct, kw_only=True, frozen=True):
    """An environment's reply. Fields that later versions add are ignored."""

    observation: msgspec.Raw
    reward: float | bool | None = None
    done: bool = False


class Error(msgspec.Struct, kw_only=True, frozen=True):
    """The reply to a request that failed."""

    message: str = ""
    code: str = ""
    errors: msgspec.Raw = msgspec.Raw(b"null")  # for VALIDATION_ERROR: the missing and the unknown fields


@dataclass(kw_only=True, slots=True)
class _Episode(Begun):
    connection: WebSocketConnection


class OpenEnvClient(EpisodeEnv[_Episode]):
    """The `Env` of an OpenEnv server. The one reward component is `openenv`, the server's; the score is their sum.

    Options: `url`, to which `/ws` is added; `action_field`, the field of its action that takes the text;
    `observation_field`, the field of its observation that is shown, or "" for all of it as JSON; `rules`, a system
    message, because the servers rarely explain the actions; `key_file`, a file with the secret for a server that
    requires one; `server_command`, which starts the server with the run.
    """

    def __init__(
        self,
        *,
        url: str,
        action_field: str = "message",
        observation_field: str = "",
        rules: str = "",
        key_file: str = "",
        server_command: str = "",
    ) -> None:
        """Raises ValueError for invalid options. Does not connect yet: the server may start later."""
        check_url(url, "an OpenEnv server")
        self._url = url.rstrip("/")
        self._headers = headers_with(read_secret(key_file, option="env.options.key_file"))
        self._action_field = action_field
        self._observation_field = observation_field
        self._rules = rules
        self._calls = SerialCalls()

    async def reset(self, task: Task) -> Observation:
        seed = task_rng(task, world="openenv").getrandbits(31)
        return await self._calls.run(lambda: self._reset(task, seed))

    async def step(self, action: str) -> Observation:
        step = super().step
        return await self._calls.run(lambda: step(valid_text(action)))

    async def close(self) -> None:
        await self._calls.run(self._drop)

    async def _reset(self, task: Task, seed: int) -> Observation:
        await self._drop()
        why = f"{self._url} gave no session within {OPEN_S:g} s; the server is full or not reachable"
        async with within(OPEN_S, self._drop, why):
            while isinstance(answer := await self._begun(task, seed), Error):
                if answer.code != CAPACITY_REACHED:
                    raise _failure(answer)
                await self._drop()
                await asyncio.sleep(RETRY_S)
        return opened(self._text(answer), rules=self._rules, terminated=answer.done)

    async def _begun(self, task: Task, seed: int) -> ObservationData | Error:
        """Start a session, which `_drop` ends."""
        connection = await connect(f"{self._url}/ws", headers=self._headers, max_message_bytes=MAX_MESSAGE_BYTES)
        self._episode = _Episode(connection=connection, task=task)
        return await _request(connection, "reset", {"seed": seed})

    async def _act(self, episode: _Episode, action: str) -> Observation:
        async with within(ANSWER_S, self._drop, f"{self._url} did not answer within {ANSWER_S:g} s"):
            answer = await _request(episode.connection, "step", {self._action_field: action})
            if isinstance(answer, Error):
                raise _failure(answer)
            return self._observed(episode, answer)

    def _observed(self, episode: _Episode, data: ObservationData) -> Observation:
        reward = float(data.reward or 0.0)
        score = min(1.0, max(0.0, episode.total_reward + reward)) if data.done else 0.0
        return answered(self._text(data), {"openenv": reward}, terminated=data.done, score=score)

    def _text(self, data: ObservationData) -> str:
        """Return the part of an observation that is shown: the text of a string, and any other value as JSON."""
        if not self._observation_field:
            return bytes(data.observation).decode()
        fields = _read(bytes(data.observation), dict[str, msgspec.Raw])
        if self._observation_field not in fields:
            raise EnvError(
                f"`env.options.observation_field` must be one of {', '.join(fields)}, the fields that {self._url} "
                f"sends, got {self._observation_field!r}"
            )
        shown = bytes(fields[self._observation_field])
        return _read(shown, str) if shown.startswith(b'"') else shown.decode()

    async def _drop(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            await episode.connection.close()


async def _request(connection: WebSocketConnection, kind: str, data: object) -> ObservationData | Error:
    """Send a message and return the reply. Raises EnvError if the connection is lost or the reply is malformed."""
    frame = _read(await connection.request(msgspec.json.encode({"type": kind, "data": data}).decode()), Frame)
    data = bytes(frame.data)
    return _read(data, Error) if frame.type == "error" else _read(data, ObservationData)


def _read(message: bytes | str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(message, type=kind)
    except MALFORMED as error:
        raise EnvError(f"malformed {kind.__name__} of OpenEnv: {error}") from error


def _failure(error: Error) -> EnvError:
    """Return the EnvError for an error reply.

    A rejected action is a failure too: its fields are wrong, so the server would reject every step.
    """
    details = bytes(error.errors).decode()[:500]
    return EnvError(f"the OpenEnv server reported {error.code}: {error.message} {details}".rstrip())
