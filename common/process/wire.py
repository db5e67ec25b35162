"""Encodes and decodes records as MessagePack frames: typed and with a size limit. Pickle is never used.

A frame is `magic (2) | schema (1) | codec (1) | body size (4, little-endian) | body`. The body is the MessagePack of
one msgspec struct, plain (codec 0) or zstd-compressed (codec 1); `body size` is its size when decompressed. The header
is checked before memory is allocated, so a hostile frame costs no more memory than its own bytes.
"""

import struct
from typing import TypeVar

import msgspec
import zstandard

SCHEMA = 5
MAX_FRAME_BYTES = 64 << 20

_HEADER = struct.Struct("<2sBBI")
_MAGIC = b"SL"
_PLAIN, _ZSTD = 0, 1
_ENCODER = msgspec.msgpack.Encoder()

# Every error that msgspec raises for malformed bytes. UnicodeError, for text that is not UTF-8, is not a MsgspecError.
MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeError)

S = TypeVar("S", bound=msgspec.Struct)


class WireError(ValueError):
    """Bytes that are not a valid frame: truncated, oversized, of another schema, or not the expected struct."""


def encode(record: msgspec.Struct, *, compress: bool = False) -> bytes:
    body = _ENCODER.encode(record)
    frame = _HEADER.pack(_MAGIC, SCHEMA, _PLAIN, len(body)) + body
    return compressed(frame) if compress else frame


def compressed(frame: bytes) -> bytes:
    """The plain `frame` with its body compressed by zstd; the same frame if that is not smaller."""
    body = memoryview(frame)[_HEADER.size :]
    smaller = _HEADER.pack(_MAGIC, SCHEMA, _ZSTD, len(body)) + zstandard.compress(body, 1)
    return smaller if len(smaller) < len(frame) else frame


def decode(kind: type[S], frame: bytes | memoryview, *, max_bytes: int = MAX_FRAME_BYTES) -> S:
    """Decode the struct in `frame`. It copies all bytes, so `frame` may be overwritten. Raises WireError."""
    body = _body(frame, max_bytes)
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except MALFORMED as error:
        raise WireError(f"not a {kind.__name__}: {error}") from error


def _body(frame: bytes | memoryview, max_bytes: int) -> bytes | memoryview:
    if len(frame) < _HEADER.size:
        raise WireError(f"frame of {len(frame)} bytes is shorter than its header of {_HEADER.size}")
    magic, schema, codec, num_bytes = _HEADER.unpack_from(frame)
    if magic != _MAGIC or schema != SCHEMA:
        raise WireError(f"frame has magic {magic!r} and schema {schema}, expected {_MAGIC!r} and {SCHEMA}")
    if num_bytes > max_bytes:
        raise WireError(f"frame declares {num_bytes} bytes, the limit is {max_bytes}")
    encoded = memoryview(frame)[_HEADER.size :]  # a slice of the bytes would copy them
    body = _decompressed(encoded, num_bytes) if codec == _ZSTD else encoded
    if codec not in (_PLAIN, _ZSTD):
        raise WireError(f"frame has unknown codec {codec}")
    if len(body) != num_bytes:
        raise WireError(f"frame declares {num_bytes} bytes and has {len(body)}")
    return body


def _decompressed(body: memoryview, num_bytes: int) -> bytes:
    # zstd ignores `max_output_size` for frames that declare a content size. So read a stream, and stop one byte after
    # the size that our header declares.
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            return reader.read(num_bytes + 1)
    except zstandard.ZstdError as error:
        raise WireError(f"not a zstd frame: {error}") from error
