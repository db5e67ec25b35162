"""The messages of a pull. A blob is any sequence of bytes, with a size and a root hash as its name.

The protocol does not interpret or check a blob's bytes: the receiver does, with the manifest.
"""

import enum
from typing import Annotated

import msgspec

CHUNK_BYTES = 4 << 20  # in one reply; the last one of a blob has fewer

Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # bytes from the start of a blob, as files count them


class Blob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some bytes that can be pulled."""

    root: str  # the hash that names them, in hex
    num_bytes: int


class ChunkRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A receiver asks for bytes of one blob, from any server."""

    root: str
    offset: Offset
    num_bytes: Annotated[int, msgspec.Meta(gt=0)]


class Farewell(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A receiver needs no more chunks and gives up its place."""


Request = ChunkRequest | Farewell


class ChunkStatus(enum.Enum):
    """The result of a request."""

    HERE = "here"
    """The bytes follow."""
    GONE = "gone"
    """This server does not have the blob, or no longer."""
    FULL = "full"
    """All places are taken: ask another server, or ask later."""


class ChunkReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a reply; the bytes follow in a frame of their own, empty unless the answer is HERE."""

    root: str
    offset: Offset
    answer: ChunkStatus
    xxh3: int  # 64-bit hash of the bytes that follow, so that damage in transit is detected at once
