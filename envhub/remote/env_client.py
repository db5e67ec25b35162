"""`remote`: an environment that `slipstream serve envs` runs on another host. It behaves like a local one.

A failure there, or of the connection, is an EnvError here. An episode ends when its connection is lost. No request is
retried: a step that the environment did twice would change the episode.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from slipstream.common.process.wire import WireError
from slipstream.common.records.message import valid_text
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.env_options import check_url
from slipstream.envhub.remote import env_protocol as protocol
from slipstream.envhub.remote.client_connection import SerialCalls, WebSocketConnection, connect, within
from slipstream.envhub.remote.env_secret import headers_with, read_secret

OPEN_S = 60.0  # time to reach the server and to get a slot there
ANSWER_S = 120.0  # longer than the server's own timeout, so a later reply is not expected

T = TypeVar("T")


class EnvClient:
    """The `Env` of a remote server. Connects when an episode starts, and uses a slot of the server until `close`."""

    waits_for_server = True

    def __init__(
        self,
        *,
        url: str,
        env: str,
        options: Mapping[str, Any] | None = None,
        key_file: str = "",
        server_command: str = "",
    ) -> None:
        """`env` is the environment's name at the server, `options` are its options. Raises ValueError if invalid.

        Does not connect yet: the server may start later, and `server_command` starts it with the run.
        """
        check_url(url, "`slipstream serve envs`")
        try:
            self._open = protocol.opening(env, options or {})
        except WireError as error:
            raise ValueError(f"`env.options.options` cannot be sent: {error}; pass fewer, or other ones") from None
        self._url = url.rstrip("/")
        self._headers = headers_with(read_secret(key_file, option="env.options.key_file"))
        self._env = env
        self._calls = SerialCalls()
        self._connection: WebSocketConnection | None = None
        self._replay_only = False
        self._state_key: str | None = None

    @property
    def replay_only(self) -> bool:
        """Whether the remote environment is `replay_only`. Connects if there is no connection yet."""
        self._calls.run_blocking(self._opened)
        return self._replay_only

    async def reset(self, task: Task) -> Observation:
        """Start `task` at the server, under the name that the environment has there."""
        request = protocol.Reset(task=msgspec.structs.replace(task, env=self._env))
        return await self._calls.run(lambda: self._begun(request))

    async def step(self, action: str) -> Observation:
        """Do `action` at the server. Raises EnvError if the environment, its server or the connection fails."""
        # A lone surrogate cannot be sent, and means nothing to any environment.
        step = protocol.StepEnv(action=valid_text(action))
        return await self._calls.run(lambda: self._observed(step))

    async def close(self) -> None:
        """Give the slot back."""
        await self._calls.run(self._close)

    def snapshot(self) -> bytes:
        """Return the state of the remote environment. Blocks until the reply, like all methods that are not async."""
        return self._calls.run_blocking(lambda: self._request(protocol.TakeSnapshot(), protocol.Snapshot)).state

    def restore(self, state: bytes) -> Observation:
        return self._calls.run_blocking(lambda: self._begun(protocol.Restore(state=state)))

    def admissible(self) -> list[str] | None:
        return self._calls.run_blocking(lambda: self._request(protocol.ListActions(), protocol.Actions)).actions

    def state_key(self) -> str:
        """Return the key that the last observation brought. Raises EnvError before a reset."""
        if self._state_key is None:
            raise EnvError(f"{self._env} at {self._url} has no episode; call reset first")
        return self._state_key

    def expert(self) -> str:
        return self._calls.run_blocking(lambda: self._request(protocol.AskExpert(), protocol.Advice)).action

    async def _begun(self, request: protocol.Reset | protocol.Restore) -> Observation:
        await self._opened()
        return await self._observed(request)

    async def _observed(self, request: protocol.EnvRequest) -> Observation:
        observed = await self._request(request, protocol.Observed)
        self._state_key = observed.state_key
        return observed.observation

    async def _opened(self) -> None:
        if self._connection is not None and self._connection.is_up:
            return
        await self._drop()
        why = f"{self._url} gave no slot for {self._env} within {OPEN_S:g} s; the server is full or not reachable"
        async with within(OPEN_S, self._drop, why):
            self._connection = await connect(
                f"{self._url}/v1/episode", headers=self._headers, max_message_bytes=protocol.MAX_MESSAGE_BYTES
            )
            self._replay_only = (await self._request(self._open, protocol.Opened)).replay_only

    async def _request(self, request: protocol.EnvRequest, kind: type[T]) -> T:
        """Return the response. Raises what the environment raised, or EnvError if the episode is lost."""
        if self._connection is None:
            raise EnvError(f"{self._env} at {self._url} has no episode; call reset first")
        async with within(ANSWER_S, self._drop, f"{self._url} did not answer within {ANSWER_S:g} s"):
            response = self._read(await self._connection.request(protocol.encode_message(request)))
        if isinstance(response, protocol.EnvLost):
            await self._drop()
        if isinstance(response, protocol.ErrorResponse):
            raise protocol.EXCEPTIONS[type(response)](response.why)
        if not isinstance(response, kind):
            await self._drop()
            raise EnvError(f"{self._url} answered {type(request).__name__} with {type(response).__name__}")
        return response

    def _read(self, message: bytes | str) -> protocol.EnvResponse:
        try:
            return protocol.decode_response(message if isinstance(message, bytes) else message.encode())
        except WireError as error:
            raise EnvError(f"{self._url}: {error}") from error

    async def _close(self) -> None:
        try:
            if self._connection is not None and self._connection.is_up:
                await self._request(protocol.Close(), protocol.Closed)
        except EnvError:
            pass  # the server frees the slot when the connection ends
        finally:
            await self._drop()

    async def _drop(self) -> None:
        connection, self._connection, self._state_key = self._connection, None, None
        if connection is not None:
            await connection.close()
