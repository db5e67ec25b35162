"""What is said while a blob is pulled: any bytes that are offered, with a size, and a root hash for a name.

Nobody here looks into a blob: what its bytes mean, and whether they are right, is for who has its manifest.
"""

import msgspec


class Blob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some bytes that can be pulled."""

    root: str  # the hash that names them, in hex
    num_bytes: int


class ChunkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receiver asks for bytes of one blob, whoever serves it."""

    root: str
    offset: int  # bytes from the start of the blob
    num_bytes: int


class ChunkReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a reply; the bytes follow in a frame of their own, empty when the blob is `gone`."""

    root: str
    offset: int
    gone: bool
