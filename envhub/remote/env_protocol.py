"""What passes between an `EnvClient`, the server and the server's workers: asks there, answers back, one for one.

Each is one MessagePack struct. In a WebSocket it is one binary message; between the server and a worker, on a pipe of
their own, it is numbered, and its size goes before it.
"""

import asyncio
import struct
from typing import Annotated, Any, TypeVar

import msgspec

from common.trajectory import Task
from common.wire import WireError
from envhub.env import EnvError, Observation

MAX_MESSAGE_BYTES = 8 << 20
READY = 0  # the number of the call that nobody made: what a worker says once it can be asked
MAX_OPTIONS_BYTES = 64 << 10  # they may be of any shape, and so cost many times their bytes once they are read

_SIZE = struct.Struct("<I")


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Open(_Message, frozen=True, kw_only=True):
    """First of all: an environment is made. Answered by Opened."""

    env: Annotated[str, msgspec.Meta(max_length=200)]
    options: msgspec.Raw  # a map

    def read_options(self) -> dict[str, Any]:
        """Raises WireError for what is no map of names, and for a large one."""
        if len(bytes(self.options)) > MAX_OPTIONS_BYTES:
            raise WireError(f"options of {len(bytes(self.options))} bytes, the limit is {MAX_OPTIONS_BYTES}")
        return _decoded(bytes(self.options), _OPTIONS)


class Reset(_Message, frozen=True, kw_only=True):
    """Answered by Observed, as Step and Restore are."""

    task: Task


class Step(_Message, frozen=True, kw_only=True):
    action: str


class Restore(_Message, frozen=True, kw_only=True):
    state: bytes


class TakeSnapshot(_Message, frozen=True, kw_only=True):
    """Answered by Snapshot."""


class ListActions(_Message, frozen=True, kw_only=True):
    """Answered by Actions."""


class AskExpert(_Message, frozen=True, kw_only=True):
    """Answered by Advice."""


class Close(_Message, frozen=True, kw_only=True):
    """Last of all. Answered by Closed."""


class Opened(_Message, frozen=True, kw_only=True):
    replay_only: bool


class Observed(_Message, frozen=True, kw_only=True):
    observation: Observation
    state_key: str  # it is asked for every turn, so it comes along


class Snapshot(_Message, frozen=True, kw_only=True):
    state: bytes


class Actions(_Message, frozen=True, kw_only=True):
    actions: list[str] | None


class Advice(_Message, frozen=True, kw_only=True):
    action: str


class Closed(_Message, frozen=True, kw_only=True):
    pass


class EnvFailed(_Message, frozen=True, kw_only=True):
    """The environment fails: an EnvError."""

    why: str


class EnvLost(_Message, frozen=True, kw_only=True):
    """The environment is no more, as its process is none: an EnvError, whatever else is asked of it."""

    why: str


class NoSense(_Message, frozen=True, kw_only=True):
    """What was asked cannot be: a ValueError."""

    why: str


class NotThere(_Message, frozen=True, kw_only=True):
    """The environment has no such thing: a NotImplementedError."""

    why: str


Ask = Open | Reset | Step | Restore | TakeSnapshot | ListActions | AskExpert | Close
Refusal = EnvFailed | EnvLost | NoSense | NotThere
Answer = Opened | Observed | Snapshot | Actions | Advice | Closed | Refusal


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An ask on its way to a worker."""

    call: int  # the number of the order, and of the answer to it
    episode: int
    ask: Ask


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker answers."""

    call: int
    answer: msgspec.Raw  # an Answer, which the server passes on as it is


S = TypeVar("S")

_ASKS: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_OPTIONS = msgspec.msgpack.Decoder(dict[str, Any])
_ENCODER = msgspec.msgpack.Encoder()


def encode_message(message: Ask | Answer) -> bytes:
    return _ENCODER.encode(message)


def decode_ask(message: bytes) -> Ask:
    """Raises WireError for bytes that are no ask."""
    return _decoded(message, _ASKS)


def decode_answer(message: bytes) -> Answer:
    """Raises WireError for bytes that are no answer."""
    return _decoded(message, _ANSWERS)


def raise_refusal(refusal: Refusal) -> None:
    """Raise here what was raised there."""
    match refusal:
        case EnvFailed(why=why) | EnvLost(why=why):
            raise EnvError(why)
        case NoSense(why=why):
            raise ValueError(why)
        case NotThere(why=why):
            raise NotImplementedError(why)


async def read_numbered(stream: asyncio.StreamReader, decoder: "msgspec.msgpack.Decoder[S]") -> S | None:
    """The next order or answer on a pipe; None at its end. Raises WireError for anything else."""
    try:
        (num_bytes,) = _SIZE.unpack(await stream.readexactly(_SIZE.size))
        if num_bytes > MAX_MESSAGE_BYTES + 1024:
            raise WireError(f"a message of {num_bytes} bytes, the limit is {MAX_MESSAGE_BYTES}")
        return _decoded(await stream.readexactly(num_bytes), decoder)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_numbered(stream: asyncio.StreamWriter, message: Order | Done) -> None:
    """Put it on the pipe, without waiting for anybody to read it."""
    body = _ENCODER.encode(message)
    stream.write(_SIZE.pack(len(body)) + body)


def _decoded(message: bytes, decoder: "msgspec.msgpack.Decoder[S]") -> S:
    try:
        return decoder.decode(message)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not what is spoken here: {error}") from error
