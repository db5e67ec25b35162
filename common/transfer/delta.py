"""Encodes and applies deltas: the bytes in which one set of weights differs from the set before it, as overwrites.

Overwrites are idempotent and do not depend on the old bytes. Elements are compared as bits, so that the result equals
the newer set to the last bit, including NaNs and signed zeros.

Format: the length of the header (8 bytes, little-endian), the header (MessagePack, a list of Patch), then for each
patch its gaps and its values. A patch covers one plane of a section: byte 0 of each element, or byte 1, and so on.
Planes are separate because a small step changes a bfloat16 by one in its last place, which seldom changes its upper
byte. The gap before a changed byte is the number of unchanged bytes in its plane since the last changed one. A gap that
is too large for its width is written as escapes: an escape is the largest number of that width, and adds itself to the
gap. A step of RL changes about 1 % of the elements in bfloat16; then a gap takes 1.1 bytes and a change 2.1.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.common.process.wire import MALFORMED
from slipstream.common.transfer.weights import DTYPE_BYTES, NUM_THREADS, TensorEntry, WeightsError

MAX_DENSITY = 0.25  # fraction of changed elements; above it, a full snapshot is hardly larger and needs no base
SECTION_ELEMENTS = 1 << 20  # of one patch: small enough that its comparison stays in the CPU's cache

_LENGTH_BYTES = 8
_WORD_BYTES = 8
_GAP_TYPES: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16}
_BIT_TYPES: dict[int, type[np.unsignedinteger[Any]]] = {2: np.uint16, 4: np.uint32}

Bits = npt.NDArray[np.unsignedinteger[Any]]
Indices = npt.NDArray[np.int64]


class Section(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """A part of one tensor, compared in one operation."""

    offset: int  # bytes from the start of the flat buffer
    num_elements: int
    element_bytes: int  # 2 or 4


class Patch(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """The changes in one plane of one section."""

    section: Section
    plane: int  # index of the byte in each element; 0 is the lowest
    num_changed: int
    gap_bytes: int  # the width of a gap: 1 or 2
    num_gaps: int  # including escapes


def encode_delta(old: memoryview, new: memoryview, tensors: Sequence[TensorEntry]) -> bytes | None:
    """The delta from the flat buffer `old` to `new`, both with the layout `tensors`; None above MAX_DENSITY."""
    sections = list(_sections(tensors))
    limit = MAX_DENSITY * sum(section.num_elements for section in sections)
    num_changed, encoded = 0, list[tuple[Patch, bytes]]()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for number, patches in pool.map(partial(_encode, old, new), sections):
            num_changed += number
            encoded += patches
            if num_changed > limit:
                pool.shutdown(cancel_futures=True)
                return None
    header = msgspec.msgpack.encode([patch for patch, _ in encoded])
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *(body for _, body in encoded)])


def apply_delta(delta: memoryview, buffer: memoryview) -> None:
    """Apply `delta` to the flat `buffer`, in place. It needs additional memory for one patch a thread only.

    Raises WeightsError for a malformed delta or one for another layout; some patches may have been applied by then.
    """
    patches, position = _header(delta)
    bodies = list[memoryview]()
    for patch in patches:
        end = position + patch.num_gaps * patch.gap_bytes + patch.num_changed
        _check(patch, delta, end, buffer)
        bodies.append(delta[position:end])
        position = end
    if position != delta.nbytes:
        raise WeightsError(f"a delta with {delta.nbytes - position} bytes after its last patch")
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in pool.map(partial(_apply, buffer), patches, bodies):
            pass


def _check(patch: Patch, delta: memoryview, end: int, buffer: memoryview) -> None:
    """Raise WeightsError unless `patch`, which ends at byte `end` of its delta, lies within delta and buffer."""
    section = patch.section
    if section.element_bytes not in _BIT_TYPES or patch.gap_bytes not in _GAP_TYPES:
        raise WeightsError(f"a delta with elements of {section.element_bytes} and gaps of {patch.gap_bytes} bytes")
    if not 0 <= patch.plane < section.element_bytes:
        raise WeightsError(f"a delta of byte {patch.plane} of elements of {section.element_bytes} bytes")
    if min(section.offset, section.num_elements, patch.num_gaps, patch.num_changed) < 0 or end > delta.nbytes:
        raise WeightsError(f"a delta of {delta.nbytes} bytes that ends before its patch at {section.offset}")
    if section.offset + section.num_elements * section.element_bytes > buffer.nbytes:
        raise WeightsError(f"a delta whose patch at {section.offset} is not within {buffer.nbytes} bytes")


def _apply(buffer: memoryview, patch: Patch, body: memoryview) -> None:
    section, values_at = patch.section, patch.num_gaps * patch.gap_bytes
    changed = _indices(np.frombuffer(body[:values_at], dtype=_GAP_TYPES[patch.gap_bytes]))
    if len(changed) != patch.num_changed or (len(changed) and changed[-1] >= section.num_elements):
        raise WeightsError(f"a delta whose gaps at {section.offset} do not lead to {patch.num_changed} elements")
    # One index into bytes: twice as fast as a row and a column.
    changed *= section.element_bytes
    changed += patch.plane
    _bits(buffer, section).view(np.uint8)[changed] = np.frombuffer(body[values_at:], dtype=np.uint8)


def _header(delta: memoryview) -> tuple[list[Patch], int]:
    """The patches, and the position of the first one's body."""
    begin = _LENGTH_BYTES + int.from_bytes(delta[:_LENGTH_BYTES], "little")
    if begin > delta.nbytes:
        raise WeightsError(f"a delta of {delta.nbytes} bytes whose header would end at byte {begin}")
    try:
        return msgspec.msgpack.decode(delta[_LENGTH_BYTES:begin], type=list[Patch]), begin
    except MALFORMED as error:
        raise WeightsError(f"a delta with a malformed header: {error}") from error


def _sections(tensors: Sequence[TensorEntry]) -> Iterator[Section]:
    for entry in tensors:
        element_bytes = DTYPE_BYTES[entry.dtype]
        num_elements = entry.num_bytes // element_bytes
        for start in range(0, num_elements, SECTION_ELEMENTS):
            yield Section(
                offset=entry.offset + start * element_bytes,
                num_elements=min(SECTION_ELEMENTS, num_elements - start),
                element_bytes=element_bytes,
            )


def _bits(buffer: memoryview, section: Section) -> Bits:
    dtype = _BIT_TYPES[section.element_bytes]
    return np.frombuffer(buffer, dtype=dtype, count=section.num_elements, offset=section.offset)


def _changed(before: Bits, after: Bits) -> tuple[Indices, Bits]:
    """The indices of the elements that differ, and for each one its old bits xor its new ones.

    Words of 8 bytes are compared first, and only those that differ are looked at: most have not changed.
    """
    per_word = _WORD_BYTES // before.itemsize
    num_whole = len(before) // per_word * per_word
    ours, theirs = (bits[:num_whole].view(np.uint64) for bits in (before, after))
    words = np.flatnonzero(ours != theirs)
    within = (ours[words] ^ theirs[words]).view(before.dtype)
    places = np.flatnonzero(within != 0)
    rest = before[num_whole:] ^ after[num_whole:]
    last = np.flatnonzero(rest != 0)
    changed = np.concatenate([words[places // per_word] * per_word + places % per_word, last + num_whole])
    return changed, np.concatenate([within[places], rest[last]])


def _planes(bits: Bits) -> npt.NDArray[np.uint8]:
    """A view of shape [elements, bytes of one], lowest byte first: torch runs on little-endian machines only."""
    return bits.view(np.uint8).reshape(len(bits), bits.itemsize)


def _encode(old: memoryview, new: memoryview, section: Section) -> tuple[int, list[tuple[Patch, bytes]]]:
    """The number of changed elements of one section, and its patches with their bodies, one for each changed plane."""
    after = _bits(new, section)
    changed, differences = _changed(_bits(old, section), after)
    planes, values = _planes(differences), _planes(after[changed])
    patches = []
    for plane in range(section.element_bytes):
        here = np.flatnonzero(planes[:, plane] != 0)
        if not len(here):
            continue
        gaps = _shortest_gaps(changed[here])
        patch = Patch(section=section, plane=plane, num_changed=len(here), gap_bytes=gaps.itemsize, num_gaps=len(gaps))
        patches.append((patch, gaps.tobytes() + values[here, plane].tobytes()))
    return len(changed), patches


def _shortest_gaps(changed: Indices) -> Bits:
    """The gaps before the changed elements, in the width that takes fewer bytes."""
    narrow = _gaps(changed, np.uint8)
    if len(narrow) <= 2 * len(changed):
        return narrow
    return min(narrow, _gaps(changed, np.uint16), key=lambda gaps: gaps.nbytes)


def _gaps(changed: Indices, gap_type: type[np.unsignedinteger[Any]]) -> Bits:
    """The gaps before the changed elements: with 1 byte, elements 2, 3, 300 give 2, 0, 255 (an escape), 41."""
    escape = int(np.iinfo(gap_type).max)
    gaps = np.diff(changed, prepend=-1) - 1
    large = np.flatnonzero(gaps >= escape)
    num_escapes, rest = np.divmod(gaps[large], escape)
    last = gaps.astype(gap_type)
    last[large] = rest
    return np.insert(last, np.repeat(large, num_escapes), escape)


def _indices(gaps: Bits) -> Indices:
    """The changed elements of the gaps: the inverse of `_gaps`."""
    last = gaps != np.iinfo(gaps.dtype).max
    reached: Indices = np.cumsum(gaps, dtype=np.int64)[last]
    reached += np.arange(len(reached))
    return reached
