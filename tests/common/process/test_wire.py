"""Frames: what is not one of ours is refused, in memory that the frame's own header bounds."""

import random
import struct
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.process.wire import MAX_FRAME_BYTES, SCHEMA, WireError, decode, encode
from slipstream.common.records.trajectory import InvalidTrajectory, decode_trajectory
from tests.common.records.test_trajectory import VOCAB_SIZE, WHOLE

PLAIN, ZSTD = 0, 1


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    number: int = 0


class Loose(msgspec.Struct, frozen=True):
    anything: Any


def frame(body: bytes, *, magic: bytes = b"SL", schema: int = SCHEMA, codec: int = PLAIN, declared: int = -1) -> bytes:
    return struct.pack("<2sBBI", magic, schema, codec, len(body) if declared < 0 else declared) + body


def test_a_record_comes_back_equal_from_a_frame_that_is_compressed_where_that_pays() -> None:
    note, noise = Note("spring " * 100, 7), Note(random.Random(0).randbytes(300).hex()[:40])
    plain, compressed = encode(note), encode(note, compress=True)
    assert decode(Note, plain) == decode(Note, compressed) == note
    assert len(compressed) < len(plain) / 5
    assert encode(noise, compress=True) == encode(noise)


@pytest.mark.parametrize(
    ("bytes_", "complaint"),
    [
        (b"", "frame of 0 bytes is shorter than its header of 8"),
        (encode(Note("a"))[:7], "frame of 7 bytes is shorter"),
        (encode(Note("a"))[:-1], "frame declares 16 bytes and has 15"),
        (encode(Note("a")) + b"x", "frame declares 16 bytes and has 17"),
        (encode(Note("a" * 500), compress=True)[:-6], "zstd|declares"),
        (frame(b"\x80", magic=b"PK"), "magic b'PK'"),
        (frame(b"\x80", schema=SCHEMA + 1), f"schema {SCHEMA + 1}"),
        (frame(b"\x80", codec=2), "unknown codec 2"),
        (frame(b"\x80", declared=MAX_FRAME_BYTES + 1), f"declares {MAX_FRAME_BYTES + 1} bytes, the limit is"),
        (frame(b"not zstd at all", codec=ZSTD), "not a zstd frame"),
        (frame(zstandard.compress(b"\x80"), codec=ZSTD, declared=2), "declares 2 bytes and has 1"),
        (frame(b"not MessagePack"), "not a Note"),
        (frame(msgspec.msgpack.encode({"text": "a", "nmber": 1})), "unknown field `nmber`"),
        (frame(msgspec.msgpack.encode({"number": 1})), "missing required field `text`"),
        (frame(msgspec.msgpack.encode({"text": 1})), "Expected `str`, got `int`"),
        (frame(b"\x81\xa4text\xa2\xff\xfe"), "not a Note"),  # no UTF-8
        (frame(b"\xdf\xff\xff\xff\xff"), "truncated"),  # a map of 2**32 - 1
        (frame(b"\x81\xa4text\xdb\xff\xff\xff\xff"), "truncated"),  # a text of 4 GiB
        (frame(b"\x91" * 1_000_000), "Expected `object`, got `array`"),
    ],
)
def test_what_is_no_frame_of_ours_is_refused(bytes_: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        decode(Note, bytes_)


def test_the_readers_own_limit_binds() -> None:
    with pytest.raises(WireError, match="declares 16 bytes, the limit is 15"):
        decode(Note, encode(Note("a")), max_bytes=15)


def test_nesting_without_end_is_refused_also_where_anything_may_stand() -> None:
    with pytest.raises(WireError, match="recursion"):
        decode(Loose, frame(b"\x81\xa8anything" + b"\x91" * 1_000_000 + b"\xc0"))


@settings(max_examples=300)
@given(st.integers(0, 2000), st.integers(0, 16), st.binary(max_size=16), st.booleans())
def test_a_damaged_trajectory_is_refused_or_valid(position: int, removed: int, inserted: bytes, compress: bool) -> None:
    whole = encode(WHOLE, compress=compress)
    position %= len(whole)
    changed = whole[:position] + inserted + whole[position + removed :]
    body = changed[8:]
    for damaged in (changed, whole[:4] + struct.pack("<I", len(body)) + body):
        try:
            trajectory = decode_trajectory(damaged, max_bytes=1 << 16, vocab_size=VOCAB_SIZE)
        except (WireError, InvalidTrajectory):
            continue
        assert trajectory.num_tokens == 10
        assert trajectory.total_reward < float("inf")
