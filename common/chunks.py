"""What is said while a blob is pulled: any bytes that are offered, with a size, and a root hash for a name.

Nobody here looks into a blob: what its bytes mean, and whether they are right, is for who has its manifest.
"""

import enum

import msgspec


class Blob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some bytes that can be pulled."""

    root: str  # the hash that names them, in hex
    num_bytes: int


class ChunkRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A receiver asks for bytes of one blob, whoever serves it."""

    root: str
    offset: int  # bytes from the start of the blob
    num_bytes: int


class Farewell(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A receiver needs no more: its place is free."""


Request = ChunkRequest | Farewell


class Answer(enum.Enum):
    """What became of a request."""

    HERE = "here"
    """The bytes follow."""
    GONE = "gone"
    """There is no such blob here, or no longer."""
    FULL = "full"
    """As many receivers as may are served: ask elsewhere, or later."""


class ChunkReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a reply; the bytes follow in a frame of their own, empty unless the answer is HERE."""

    root: str
    offset: int
    answer: Answer
    xxh3: int  # 64 bits, of the bytes that follow: what the way did to them shows at once
