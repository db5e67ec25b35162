"""A delta: the elements in which one set of weights differs from the set before it, as overwrites.

An overwrite can be made twice without harm, and none depends on what stood there before. Elements are compared as bits,
so that what comes out is the newer set to the last bit, NaNs and zeros with a sign included.

A delta is the length of its header (8 bytes, little-endian), the header (MessagePack, a list of Patch), then for each
patch its gaps and its values. The gap before a changed element is the number of unchanged ones since the last; a gap
that its width cannot hold is cut into escapes, the largest number of that width, each of which adds itself. At the 1 %
of changes that a step of RL leaves in bfloat16, a gap is 1.1 bytes and a change 3.1.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from common.weights import DTYPE_BYTES, TensorEntry, WeightsError

MAX_DENSITY = 0.25  # of elements changed; above it, whole weights are hardly larger and need no base
SEGMENT_ELEMENTS = 1 << 24  # of one patch: what is compared at once, and bounds the memory that it takes

_LENGTH_BYTES = 8
_GAP_TYPES: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16}
_BIT_TYPES: dict[int, type[np.unsignedinteger[Any]]] = {2: np.uint16, 4: np.uint32}

Bits = npt.NDArray[np.unsignedinteger[Any]]
Indices = npt.NDArray[np.int64]


class Patch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The changes within one stretch of one tensor."""

    offset: int  # bytes from the start of the flat buffer
    num_elements: int  # in the stretch
    element_bytes: int  # 2 or 4
    num_changed: int
    gap_bytes: int  # the width of a gap: 1 or 2
    num_gaps: int  # escapes included


def encode_delta(old: memoryview, new: memoryview, tensors: Sequence[TensorEntry]) -> bytes | None:
    """What turns the flat buffer `old` into `new`, both laid out as `tensors`.

    None where more than MAX_DENSITY of the elements changed; that is known before all are compared.
    """
    most = MAX_DENSITY * sum(entry.num_bytes // DTYPE_BYTES[entry.dtype] for entry in tensors)
    patches, bodies, num_changed = [], [], 0
    for offset, num_elements, element_bytes in _segments(tensors):
        before, after = (_bits(buffer, offset, num_elements, element_bytes) for buffer in (old, new))
        changed = _changed(before, after)
        num_changed += len(changed)
        if num_changed > most:
            return None
        if not len(changed):
            continue
        gaps = min((_gaps(changed, gap_bytes) for gap_bytes in _GAP_TYPES), key=lambda gaps: gaps.nbytes)
        patches.append(
            Patch(
                offset=offset,
                num_elements=num_elements,
                element_bytes=element_bytes,
                num_changed=len(changed),
                gap_bytes=gaps.itemsize,
                num_gaps=len(gaps),
            )
        )
        bodies += [gaps.tobytes(), after[changed].tobytes()]
    header = msgspec.msgpack.encode(patches)
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *bodies])


def apply_delta(delta: memoryview, buffer: memoryview) -> None:
    """Overwrite in the flat `buffer` what `delta` says has changed. Memory beside it is bounded by one patch.

    Raises WeightsError for what is no delta of such a buffer; earlier patches of it may have been applied by then.
    """
    patches, position = _header(delta)
    for patch in patches:
        if patch.element_bytes not in _BIT_TYPES or patch.gap_bytes not in _GAP_TYPES:
            raise WeightsError(f"a delta with elements of {patch.element_bytes} and gaps of {patch.gap_bytes} bytes")
        values_at = position + patch.num_gaps * patch.gap_bytes
        end = values_at + patch.num_changed * patch.element_bytes
        stretch_end = patch.offset + patch.num_elements * patch.element_bytes
        if min(patch.offset, patch.num_gaps, patch.num_changed, patch.num_elements) < 0 or end > delta.nbytes:
            raise WeightsError(f"a delta of {delta.nbytes} bytes that ends before its patch at {patch.offset}")
        if stretch_end > buffer.nbytes:
            raise WeightsError(f"a delta that changes byte {stretch_end} of a buffer of {buffer.nbytes}")
        changed = _indices(np.frombuffer(delta[position:values_at], dtype=_GAP_TYPES[patch.gap_bytes]))
        if len(changed) != patch.num_changed or (len(changed) and changed[-1] >= patch.num_elements):
            raise WeightsError(f"a delta whose gaps at {patch.offset} do not lead to {patch.num_changed} elements")
        values = np.frombuffer(delta[values_at:end], dtype=_BIT_TYPES[patch.element_bytes])
        _bits(buffer, patch.offset, patch.num_elements, patch.element_bytes)[changed] = values
        position = end
    if position != delta.nbytes:
        raise WeightsError(f"a delta with {delta.nbytes - position} bytes behind its last patch")


def _header(delta: memoryview) -> tuple[list[Patch], int]:
    """The patches, and where the first one's body begins."""
    begin = _LENGTH_BYTES + int.from_bytes(delta[:_LENGTH_BYTES], "little")
    if begin > delta.nbytes:
        raise WeightsError(f"a delta of {delta.nbytes} bytes with a header of {begin}")
    try:
        return msgspec.msgpack.decode(delta[_LENGTH_BYTES:begin], type=list[Patch]), begin
    except msgspec.MsgspecError as error:
        raise WeightsError(f"not the header of a delta: {error}") from error


def _segments(tensors: Sequence[TensorEntry]) -> Iterator[tuple[int, int, int]]:
    """(offset in bytes, elements, bytes of an element) of every stretch that is compared at once."""
    for entry in tensors:
        element_bytes = DTYPE_BYTES[entry.dtype]
        num_elements = entry.num_bytes // element_bytes
        for start in range(0, num_elements, SEGMENT_ELEMENTS):
            yield (
                entry.offset + start * element_bytes,
                min(SEGMENT_ELEMENTS, num_elements - start),
                element_bytes,
            )


def _bits(buffer: memoryview, offset: int, num_elements: int, element_bytes: int) -> Bits:
    return np.frombuffer(buffer, dtype=_BIT_TYPES[element_bytes], count=num_elements, offset=offset)


def _changed(old: Bits, new: Bits) -> Indices:
    """The indices of elements that differ, rising. Whole words first: nearly all are alike, and are out in one look."""
    in_word = 8 // old.itemsize
    num_in_words = len(old) // in_word * in_word
    old_words, new_words = old[:num_in_words].view(np.uint64), new[:num_in_words].view(np.uint64)
    words = np.flatnonzero(old_words != new_words)
    row, column = np.nonzero(old_words[words].view(old.dtype).reshape(-1, in_word)
                             != new_words[words].view(new.dtype).reshape(-1, in_word))  # fmt: skip
    rest = np.flatnonzero(old[num_in_words:] != new[num_in_words:]) + num_in_words
    indices: Indices = np.concatenate([words[row] * in_word + column, rest])
    return indices


def _gaps(changed: Indices, gap_bytes: int) -> Bits:
    """With a width of 1 byte, the elements 2, 3 and 300 are 2, 0, 255 (an escape) and 41."""
    gap_type = _GAP_TYPES[gap_bytes]
    escape = int(np.iinfo(gap_type).max)
    num_escapes, last = np.divmod(np.diff(changed, prepend=-1) - 1, escape)
    gaps = np.full(len(changed) + int(num_escapes.sum()), escape, dtype=gap_type)
    gaps[np.cumsum(num_escapes + 1) - 1] = last
    return gaps


def _indices(gaps: Bits) -> Indices:
    """The inverse of `_gaps`."""
    last = gaps != np.iinfo(gaps.dtype).max
    reached: Indices = np.cumsum(gaps, dtype=np.int64)[last]
    reached += np.arange(len(reached))
    return reached
