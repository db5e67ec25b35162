"""OpenEnv's wire (https://github.com/meta-pytorch/OpenEnv), as openenv-core 0.3 speaks it: JSON over a WebSocket `/ws`.

    {"type": "reset", "data": {"seed": 3}}         -> {"type": "observation", "data": {"observation", "reward", "done"}}
    {"type": "step", "data": {ACTION'S FIELDS}}    -> the same
    {"type": "state"}                              -> {"type": "state", "data": {"episode_id", "step_count"}}
    {"type": "close"}                              -> no answer
    what cannot be done                            -> {"type": "error", "data": {"message", "code"}}

One connection is one session. (Over HTTP their /reset and /step make a new environment for each request.) What may be
of any shape stays text here, as it would cost many times its bytes once it is read.
"""

from typing import TypeVar

import msgspec

from common.wire import WireError

MAX_MESSAGE_BYTES = 8 << 20

VALIDATION_ERROR = "VALIDATION_ERROR"
EXECUTION_ERROR = "EXECUTION_ERROR"
CAPACITY_REACHED = "CAPACITY_REACHED"


class Frame(msgspec.Struct, kw_only=True, frozen=True):
    """A message of either side."""

    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


class Moment(msgspec.Struct, kw_only=True, frozen=True):
    """What an environment answers. Fields that later versions add are passed over."""

    observation: msgspec.Raw
    reward: float | bool | None = None
    done: bool = False


class Error(msgspec.Struct, kw_only=True, frozen=True):
    """What is answered in place of an observation."""

    message: str = ""
    code: str = ""
    errors: msgspec.Raw = msgspec.Raw(b"null")  # VALIDATION_ERROR: the fields that are missing, or too many


T = TypeVar("T")


def read(message: bytes | str, kind: type[T]) -> T:
    """Raises WireError for what is no such thing."""
    try:
        return msgspec.json.decode(message, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not OpenEnv's {kind.__name__}: {error}") from error


def written(kind: str, data: object) -> str:
    return msgspec.json.encode({"type": kind, "data": data}).decode()
