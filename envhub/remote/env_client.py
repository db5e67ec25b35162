"""`remote`: an environment that `slipstream envs serve` runs elsewhere. Who plays it cannot tell it from a near one.

What fails there, or on the way, is an EnvError here. An episode whose connection is lost is over: there is nothing to
be asked again, because a step that was done twice would be another episode.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from common.trajectory import Task
from common.wire import WireError
from envhub.remote.env_protocol import (
    MAX_MESSAGE_BYTES,
    MAX_OPTIONS_BYTES,
    Actions,
    Advice,
    Answer,
    Ask,
    AskExpert,
    Close,
    Closed,
    EnvLost,
    ListActions,
    Observed,
    Open,
    Opened,
    Refusal,
    Reset,
    Restore,
    Snapshot,
    Step,
    TakeSnapshot,
    decode_answer,
    encode_message,
    raise_refusal,
)
from envhub.env import EnvError, Observation
from envhub.remote.env_secret import headers_with, read_secret
from envhub.remote.client_connection import InTurn, Line, connected

OPEN_S = 60.0  # to reach the server, and to wait for a slot there
ANSWER_S = 120.0  # the server cuts what takes too long itself; beyond this nothing comes any more

T = TypeVar("T")


class EnvClient:
    """The `Env` that is played elsewhere. Connects when an episode starts, and holds a slot there until `close`."""

    def __init__(
        self, *, url: str, env: str, options: Mapping[str, Any] | None = None, key_file: str = ""
    ) -> None:  # fmt: skip
        """`env` is the environment's name there, with `options` of its own. Raises ValueError for what cannot be meant.

        Nobody is asked yet: the server may come up later.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`env.options.url` must be http://HOST:PORT of `slipstream envs serve`, got {url!r}")
        packed = msgspec.msgpack.encode(dict(options or {}))
        if len(packed) > MAX_OPTIONS_BYTES:
            raise ValueError(f"`env.options.options` are {len(packed)} bytes, the limit is {MAX_OPTIONS_BYTES}")
        self._url = url.rstrip("/")
        self._headers = headers_with(read_secret(key_file, option="env.options.key_file"))
        self._open = Open(env=env, options=msgspec.Raw(packed))
        self._env = env
        self._in_turn = InTurn()
        self._line: Line | None = None
        self._replay_only = False
        self._state_key: str | None = None

    @property
    def replay_only(self) -> bool:
        """Whether the environment there is; connects where nobody has yet."""
        self._in_turn.wait(self._opened)
        return self._replay_only

    async def reset(self, task: Task) -> Observation:
        """Start the same task there: the environment's own, under its own name."""
        return await self._in_turn.do(lambda: self._reset(task))

    async def step(self, action: str) -> Observation:
        """Do `action` there. Raises EnvError where the environment, its server or the connection fails."""
        # A lone surrogate cannot be sent; no environment takes one for anything.
        step = Step(action=action.encode(errors="replace").decode())
        return await self._in_turn.do(lambda: self._observed(step))

    async def close(self) -> None:
        """Give the slot back."""
        await self._in_turn.do(self._close)

    def snapshot(self) -> bytes:
        """The state there. As all that is not awaited, it blocks until the answer is here."""
        return self._in_turn.wait(lambda: self._asked(TakeSnapshot(), Snapshot)).state

    def restore(self, state: bytes) -> Observation:
        return self._in_turn.wait(lambda: self._restored(state))

    def admissible(self) -> list[str] | None:
        return self._in_turn.wait(lambda: self._asked(ListActions(), Actions)).actions

    def state_key(self) -> str:
        """It came with the last observation. Raises EnvError before a reset."""
        if self._state_key is None:
            raise EnvError(f"{self._env} at {self._url} has no episode; call reset first")
        return self._state_key

    def expert(self) -> str:
        return self._in_turn.wait(lambda: self._asked(AskExpert(), Advice)).action

    async def _reset(self, task: Task) -> Observation:
        await self._opened()
        return await self._observed(Reset(task=msgspec.structs.replace(task, env=self._env)))

    async def _restored(self, state: bytes) -> Observation:
        await self._opened()
        return await self._observed(Restore(state=state))

    async def _observed(self, ask: Ask) -> Observation:
        observed = await self._asked(ask, Observed)
        self._state_key = observed.state_key
        return observed.observation

    async def _opened(self) -> None:
        if self._line is not None and self._line.is_up:
            return
        await self._drop()
        try:
            async with asyncio.timeout(OPEN_S):
                self._line = await connected(
                    f"{self._url}/v1/episode", headers=self._headers, max_message_bytes=MAX_MESSAGE_BYTES
                )
                self._replay_only = (await self._asked(self._open, Opened)).replay_only
        except TimeoutError:
            await self._drop()
            raise EnvError(
                f"{self._url} gave no slot for {self._env} within {OPEN_S:g} s; it is full or away"
            ) from None
        except BaseException:
            await self._drop()
            raise

    async def _asked(self, ask: Ask, kind: type[T]) -> T:
        """What is answered. Raises what was raised there; EnvError where nothing comes, and the episode is lost."""
        if self._line is None:
            raise EnvError(f"{self._env} at {self._url} has no episode; call reset first")
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = _read(await self._line.ask(encode_message(ask)))
        except TimeoutError:
            await self._drop()
            raise EnvError(f"{self._url} did not answer within {ANSWER_S:g} s") from None
        except BaseException:  # a caller that waits no longer leaves an answer behind that nobody asked for
            await self._drop()
            raise
        if isinstance(answer, EnvLost):
            await self._drop()
        if isinstance(answer, Refusal):
            raise_refusal(answer)
        if not isinstance(answer, kind):
            await self._drop()
            raise EnvError(f"{self._url} answered {type(ask).__name__} with {type(answer).__name__}")
        return answer

    async def _close(self) -> None:
        try:
            if self._line is not None and self._line.is_up:
                await self._asked(Close(), Closed)
        except EnvError:
            pass  # with the connection, the slot is given back as well
        finally:
            await self._drop()

    async def _drop(self) -> None:
        line, self._line, self._state_key = self._line, None, None
        if line is not None:
            await line.close()


def _read(message: bytes | str) -> Answer:
    try:
        return decode_answer(message if isinstance(message, bytes) else message.encode())
    except WireError as error:
        raise EnvError(str(error)) from error
