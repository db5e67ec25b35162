"""The messages of the environment protocol, between `EnvClient`, the server and its workers: one response a request.

Each message is one MessagePack struct, and its tag is the name on the wire. A WebSocket carries it as one binary
message. A pipe between the server and a worker carries it with the number of its call, after its size.
"""

import asyncio
import struct
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from slipstream.common.process.wire import MALFORMED, WireError
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError, Observation

MAX_MESSAGE_BYTES = 8 << 20
READY = 0  # the call number of the response that a worker sends, without a request, when it has started
MAX_OPTIONS_BYTES = 64 << 10  # options may have any shape, so decoding them may take many times their size in memory

_SIZE = struct.Struct("<I")


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Open(_Message, frozen=True, kw_only=True):
    """The first request: create an environment. Answered by Opened."""

    env: Annotated[str, msgspec.Meta(max_length=200)]
    options: msgspec.Raw  # a map

    def read_options(self) -> dict[str, Any]:
        """Return the decoded options. Raises WireError if they are too large, or are not a map with text keys."""
        if len(bytes(self.options)) > MAX_OPTIONS_BYTES:
            raise WireError(f"options of {len(bytes(self.options))} bytes, the limit is {MAX_OPTIONS_BYTES}")
        return _decoded(bytes(self.options), _OPTIONS)


class Reset(_Message, frozen=True, kw_only=True):
    """Start a task. Answered by Observed, like StepEnv and Restore."""

    task: Task


class StepEnv(_Message, frozen=True, kw_only=True, tag="Step"):
    """Do an action in the environment."""

    action: str


class Restore(_Message, frozen=True, kw_only=True):
    """Continue from a snapshot."""

    state: bytes


class TakeSnapshot(_Message, frozen=True, kw_only=True):
    """Answered by Snapshot."""


class ListActions(_Message, frozen=True, kw_only=True):
    """Answered by Actions."""


class AskExpert(_Message, frozen=True, kw_only=True):
    """Answered by Advice."""


class Close(_Message, frozen=True, kw_only=True):
    """The last request. Answered by Closed."""


class Opened(_Message, frozen=True, kw_only=True):
    replay_only: bool


class Observed(_Message, frozen=True, kw_only=True):
    observation: Observation
    state_key: str  # sent with every observation, because clients read it every turn


class Snapshot(_Message, frozen=True, kw_only=True):
    state: bytes


class Actions(_Message, frozen=True, kw_only=True):
    actions: list[str] | None


class Advice(_Message, frozen=True, kw_only=True):
    action: str


class Closed(_Message, frozen=True, kw_only=True):
    pass


class EnvFailed(_Message, frozen=True, kw_only=True):
    """The environment failed: an EnvError at the client."""

    why: str


class EnvLost(_Message, frozen=True, kw_only=True):
    """The environment's process has ended: an EnvError at the client, and for every later request."""

    why: str


class InvalidRequest(_Message, frozen=True, kw_only=True, tag="NoSense"):
    """The request was invalid: a ValueError at the client."""

    why: str


class NotSupported(_Message, frozen=True, kw_only=True, tag="NotThere"):
    """The environment does not support the request: a NotImplementedError at the client."""

    why: str


EnvRequest = Open | Reset | StepEnv | Restore | TakeSnapshot | ListActions | AskExpert | Close
ErrorResponse = EnvFailed | EnvLost | InvalidRequest | NotSupported
# What a client raises for each.
EXCEPTIONS: dict[type[ErrorResponse], type[Exception]] = {
    EnvFailed: EnvError,
    EnvLost: EnvError,
    InvalidRequest: ValueError,
    NotSupported: NotImplementedError,
}
EnvResponse = Opened | Observed | Snapshot | Actions | Advice | Closed | ErrorResponse


class WorkerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the server passes it to a worker."""

    call: int  # the number of the request; its response has the same
    episode: int
    request: EnvRequest = msgspec.field(name="ask")


class WorkerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's response to the request of the same number."""

    call: int
    response: msgspec.Raw = msgspec.field(name="answer")  # an encoded EnvResponse, which the server passes on unread


S = TypeVar("S")

_REQUESTS: msgspec.msgpack.Decoder[EnvRequest] = msgspec.msgpack.Decoder(EnvRequest)
_RESPONSES: msgspec.msgpack.Decoder[EnvResponse] = msgspec.msgpack.Decoder(EnvResponse)
_OPTIONS = msgspec.msgpack.Decoder(dict[str, Any])
_ENCODER = msgspec.msgpack.Encoder()


def opening(env: str, options: Mapping[str, Any]) -> Open:
    """The request that opens `env` with `options`. Raises WireError if they cannot be sent."""
    try:
        request = Open(env=env, options=msgspec.Raw(_ENCODER.encode(dict(options))))
    except (TypeError, UnicodeError, OverflowError) as error:  # MessagePack has no integers of more than 64 bits
        raise WireError(f"malformed options: {error}") from error
    request.read_options()
    return request


def encode_message(message: EnvRequest | EnvResponse) -> bytes:
    return _ENCODER.encode(message)


def decode_request(message: bytes) -> EnvRequest:
    """Return the request in `message`. Raises WireError if it is malformed."""
    return _decoded(message, _REQUESTS)


def decode_response(message: bytes) -> EnvResponse:
    """Return the response in `message`. Raises WireError if it is malformed."""
    return _decoded(message, _RESPONSES)


async def read_numbered(stream: asyncio.StreamReader, decoder: "msgspec.msgpack.Decoder[S]") -> S | None:
    """Return the next message of a pipe, or None at its end. Raises WireError if it is malformed or too large."""
    try:
        (num_bytes,) = _SIZE.unpack(await stream.readexactly(_SIZE.size))
        if num_bytes > MAX_MESSAGE_BYTES + 1024:
            raise WireError(f"a message of {num_bytes} bytes, the limit is {MAX_MESSAGE_BYTES}")
        return _decoded(await stream.readexactly(num_bytes), decoder)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_numbered(stream: asyncio.StreamWriter, message: WorkerRequest | WorkerResponse) -> None:
    """Write `message` to a pipe, without waiting until the other side reads it."""
    body = _ENCODER.encode(message)
    stream.write(_SIZE.pack(len(body)) + body)


def _decoded(message: bytes, decoder: "msgspec.msgpack.Decoder[S]") -> S:
    try:
        return decoder.decode(message)
    except MALFORMED as error:
        raise WireError(f"malformed message of the environment protocol: {error}") from error
