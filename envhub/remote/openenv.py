"""OpenEnv's messages (https://github.com/meta-pytorch/OpenEnv), as of openenv-core 0.3: JSON over a WebSocket `/ws`.

    {"type": "reset", "data": {"seed": 3}}         -> {"type": "observation", "data": {"observation", "reward", "done"}}
    {"type": "step", "data": {ACTION'S FIELDS}}    -> the same
    {"type": "state"}                              -> {"type": "state", "data": {"episode_id", "step_count"}}
    {"type": "close"}                              -> no reply
    an invalid request                             -> {"type": "error", "data": {"message", "code"}}

One connection is one session. (Over HTTP, OpenEnv's /reset and /step make a new environment for each request.) A field
that may have any shape stays JSON here, because decoding it may take many times its size in memory.
"""

from typing import TypeVar

import msgspec

from slipstream.common.process.wire import MALFORMED, WireError

MAX_MESSAGE_BYTES = 8 << 20

VALIDATION_ERROR = "VALIDATION_ERROR"
EXECUTION_ERROR = "EXECUTION_ERROR"
CAPACITY_REACHED = "CAPACITY_REACHED"


class Frame(msgspec.Struct, kw_only=True, frozen=True):
    """A message from a client or a server."""

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


T = TypeVar("T")


def read(message: bytes | str, kind: type[T]) -> T:
    """Return `message` decoded as `kind`. Raises WireError if it is malformed."""
    try:
        return msgspec.json.decode(message, type=kind)
    except MALFORMED as error:
        raise WireError(f"malformed {kind.__name__} of OpenEnv: {error}") from error


def written(kind: str, data: object) -> str:
    return msgspec.json.encode({"type": kind, "data": data}).decode()
