"""`openenv`: an environment that an OpenEnv server runs, played over its WebSocket."""

import asyncio
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from common.message import Message
from common.trajectory import Task
from common.wire import WireError
from envhub.env import EnvError, Observation
from envhub.remote.env_secret import headers_with, read_secret
from envhub.remote.client_connection import InTurn, Line, connected
from envhub.remote.openenv import CAPACITY_REACHED, MAX_MESSAGE_BYTES, Error, Frame, Moment, read, written
from envhub.task_seed import task_rng

OPEN_S = 60.0  # to reach the server, and to wait for a session there
ANSWER_S = 120.0
RETRY_S = 0.5


@dataclass(kw_only=True, slots=True)
class _Episode:
    line: Line
    task_id: str
    total_reward: float = 0.0
    is_over: bool = False


class OpenEnvClient:
    """The `Env` of an OpenEnv server. The one reward component is `openenv`, the server's; the score is their sum.

    Options: `url`, to which `/ws` is added; `action_field`, the field of its action that takes the text;
    `observation_field`, the field of its observation that is shown, or "" for all of it as JSON; `rules`, a system
    message, as the servers rarely tell how to act; `key_file`, what is shown to a server that asks for a secret.
    """

    replay_only: ClassVar[bool] = True

    def __init__(
        self,
        *,
        url: str,
        action_field: str = "message",
        observation_field: str = "",
        rules: str = "",
        key_file: str = "",
    ) -> None:
        """Raises ValueError for what cannot be meant. Nobody is asked yet: the server may come up later."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`env.options.url` must be http://HOST:PORT of an OpenEnv server, got {url!r}")
        self._url = url.rstrip("/")
        self._headers = headers_with(read_secret(key_file, option="env.options.key_file"))
        self._action_field = action_field
        self._observation_field = observation_field
        self._rules = rules
        self._in_turn = InTurn()
        self._episode: _Episode | None = None

    async def reset(self, task: Task) -> Observation:
        """Start `task`, by a seed made from it. Raises ValueError for a split that does not exist."""
        seed = task_rng(task, world="openenv").getrandbits(31)
        return await self._in_turn.do(lambda: self._reset(task.task_id, seed))

    async def step(self, action: str) -> Observation:
        return await self._in_turn.do(lambda: self._step(action))

    async def close(self) -> None:
        await self._in_turn.do(self._drop)

    def snapshot(self) -> bytes:
        raise NotImplementedError("OpenEnv has no snapshots; replay its actions")

    def restore(self, state: bytes) -> Observation:
        raise NotImplementedError("OpenEnv has no snapshots; replay its actions")

    def admissible(self) -> list[str] | None:
        return None

    def state_key(self) -> str:
        return ""

    def expert(self) -> str:
        raise NotImplementedError("OpenEnv has no experts; begin with `slipstream sft`")

    async def _reset(self, task_id: str, seed: int) -> Observation:
        await self._drop()
        try:
            async with asyncio.timeout(OPEN_S):
                moment, line = await self._begun(written("reset", {"seed": seed}))
        except TimeoutError:
            raise EnvError(f"{self._url} gave no session within {OPEN_S:g} s; it is full or away") from None
        self._episode = _Episode(line=line, task_id=task_id)
        system = (Message("system", self._rules),) if self._rules else ()
        return Observation(messages=(*system, Message("user", self._text(moment))), rewards={}, terminated=moment.done)

    async def _begun(self, reset: str) -> tuple[Moment, Line]:
        """The start of a session; a server that has as many as it may is asked again."""
        while True:
            line = await connected(f"{self._url}/ws", headers=self._headers, max_message_bytes=MAX_MESSAGE_BYTES)
            try:
                answer = await _asked(line, reset)
                if isinstance(answer, Moment):
                    return answer, line
                if answer.code != CAPACITY_REACHED:
                    raise _failure(answer)
                await line.close()
            except BaseException:
                await line.close()
                raise
            await asyncio.sleep(RETRY_S)

    async def _step(self, action: str) -> Observation:
        episode = self._episode
        if episode is None:
            raise EnvError(f"{self._url} has no episode; call reset first")
        if episode.is_over:
            raise EnvError(f"the episode of {episode.task_id} is over; call reset first")
        spoken = action.encode(errors="replace").decode()
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await _asked(episode.line, written("step", {self._action_field: spoken}))
            if isinstance(answer, Error):
                raise _failure(answer)
            return self._observed(episode, answer)
        except TimeoutError:
            await self._drop()
            raise EnvError(f"{self._url} did not answer within {ANSWER_S:g} s") from None
        except BaseException:  # an answer that nobody waits for would be taken for the next one
            await self._drop()
            raise

    def _observed(self, episode: _Episode, moment: Moment) -> Observation:
        reward = float(moment.reward or 0.0)
        episode.total_reward += reward
        episode.is_over = moment.done
        score = min(1.0, max(0.0, episode.total_reward)) if moment.done else 0.0
        return Observation(
            messages=(Message("user", self._text(moment)),),
            rewards={"openenv": reward},
            terminated=moment.done,
            score=score,
            success=score == 1.0,
        )

    def _text(self, moment: Moment) -> str:
        """What is shown of an observation: a text as it is, all else as the JSON that the server wrote."""
        if not self._observation_field:
            return bytes(moment.observation).decode()
        fields = read(bytes(moment.observation), dict[str, msgspec.Raw])
        if self._observation_field not in fields:
            raise EnvError(
                f"`env.options.observation_field` must be one of {', '.join(fields)}, as {self._url} has it, got "
                f"{self._observation_field!r}"
            )
        shown = bytes(fields[self._observation_field])
        return read(shown, str) if shown.startswith(b'"') else shown.decode()

    async def _drop(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            await episode.line.close()


async def _asked(line: Line, message: str) -> Moment | Error:
    """Raises EnvError where nothing comes, or something else."""
    told = await line.ask(message)
    try:
        frame = read(told, Frame)
        if frame.type == "error":
            return read(bytes(frame.data), Error)
        return read(bytes(frame.data), Moment)
    except WireError as error:
        raise EnvError(str(error)) from error


def _failure(error: Error) -> EnvError:
    """A refused action is one too: its fields are wrong, and every step would be refused."""
    details = bytes(error.errors).decode()[:500]
    return EnvError(f"the OpenEnv server says {error.code}: {error.message} {details}".rstrip())
