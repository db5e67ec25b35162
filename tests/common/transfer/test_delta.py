"""Deltas: what one does to the weights before it, bit for bit, and what is no delta."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.transfer import delta as delta_module
from slipstream.common.transfer.delta import Patch, Section, apply_delta, encode_delta
from slipstream.common.transfer.weights import TensorEntry, WeightsError, buffer_bytes, layout


def entries_of(*tensors: tuple[str, int]) -> list[TensorEntry]:
    return layout((f"t{index}", dtype, (size,)) for index, (dtype, size) in enumerate(tensors))


def changed(old: bytes, entries: Sequence[TensorEntry], elements: dict[tuple[int, int], int]) -> bytes:
    """`old` with `elements[tensor, index]` set to these bits."""
    new = bytearray(old)
    for (tensor, index), bits in elements.items():
        size = 4 if entries[tensor].dtype == "float32" else 2
        start = entries[tensor].offset + index * size
        new[start : start + size] = bits.to_bytes(size, "little")
    return bytes(new)


def encoded(old: bytes, new: bytes, entries: Sequence[TensorEntry]) -> bytes:
    return encode_delta(memoryview(old), memoryview(new), entries)


def applied(delta: bytes, old: bytes) -> bytes:
    buffer = bytearray(old)
    apply_delta(memoryview(delta), memoryview(buffer))
    return bytes(buffer)


def section(offset: int, num_elements: int, element_bytes: int) -> Section:
    return Section(offset=offset, num_elements=num_elements, element_bytes=element_bytes)


def with_header(patch: Patch, body: bytes) -> bytes:
    header = msgspec.msgpack.encode([patch])
    return len(header).to_bytes(8, "little") + header + body


def test_a_delta_by_hand() -> None:
    entries = entries_of(("bfloat16", 1000), ("float32", 50))
    old = bytes(buffer_bytes(entries))
    new = changed(old, entries, {(0, 2): 0x3F80, (0, 3): 0xBF80, (0, 300): 0x0001, (1, 7): 0x7FC00001})
    first, second = section(0, 1000, 2), section(2048, 50, 4)
    patches = [
        Patch(section=first, plane=0, num_changed=3, gap_bytes=1, num_gaps=4),
        Patch(section=first, plane=1, num_changed=2, gap_bytes=1, num_gaps=2),
        Patch(section=second, plane=0, num_changed=1, gap_bytes=1, num_gaps=1),
        Patch(section=second, plane=2, num_changed=1, gap_bytes=1, num_gaps=1),
        Patch(section=second, plane=3, num_changed=1, gap_bytes=1, num_gaps=1),
    ]
    header = msgspec.msgpack.encode(patches)
    body = bytes([2, 0, 255, 41, 0x80, 0x80, 0x01, 2, 0, 0x3F, 0xBF])  # 0x0001 has nothing in its upper byte
    body += bytes([7, 0x01, 7, 0xC0, 7, 0x7F])
    assert encoded(old, new, entries) == len(header).to_bytes(8, "little") + header + body
    assert applied(encoded(old, new, entries), old) == new


def test_gaps_between_few_changes_are_two_bytes_wide() -> None:
    entries = entries_of(("bfloat16", 100_000))
    old = bytes(buffer_bytes(entries))
    new = changed(old, entries, {(0, 20_000): 1, (0, 90_000): 1})
    delta = encoded(old, new, entries)
    (patch,) = msgspec.msgpack.decode(delta[8 : 8 + delta[0]], type=list[Patch])
    assert (patch.gap_bytes, patch.num_gaps) == (2, 3), "20000, then an escape and 4464"
    assert applied(delta, old) == new


def test_the_same_weights_are_an_empty_delta() -> None:
    entries = entries_of(("bfloat16", 1000))
    old = bytes(buffer_bytes(entries))
    assert encoded(old, old, entries) == b"\x01" + bytes(7) + b"\x90"


@pytest.mark.parametrize(("num_changed", "is_delta"), [(250, True), (251, False)])
def test_above_a_quarter_of_the_elements_there_is_no_delta(num_changed: int, is_delta: bool) -> None:
    entries = entries_of(("bfloat16", 500), ("float32", 500))
    old = bytes(buffer_bytes(entries))
    new = changed(old, entries, {(1, index): 1 for index in range(num_changed)})
    assert (encode_delta(memoryview(old), memoryview(new), entries) is not None) == is_delta


BUFFERS = st.lists(st.tuples(st.sampled_from(["bfloat16", "float16", "float32"]), st.integers(0, 700)), max_size=4)


@settings(max_examples=200)
@given(st.data(), BUFFERS, st.integers(1, 400), st.floats(0, 0.24))
def test_any_delta_leads_from_the_old_bits_to_the_new(
    data: st.DataObject, tensors: list[tuple[str, int]], section_elements: int, density: float
) -> None:
    entries = entries_of(*tensors)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    old = random.bytes(buffer_bytes(entries))
    elements = {
        (tensor, int(index)): int(random.integers(2**16))
        for tensor, (_, size) in enumerate(tensors)
        for index in random.choice(size, int(density * size), replace=False)
    }
    new = changed(old, entries, elements)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_module, "SECTION_ELEMENTS", section_elements)
        delta = encoded(old, new, entries)
    assert applied(delta, old) == new
    half_done = changed(old, entries, dict(list(elements.items())[::2]))
    assert applied(delta, half_done) == applied(delta, new) == new


PATCH = Patch(section=section(0, 10, 2), plane=0, num_changed=2, gap_bytes=1, num_gaps=2)
BODY = bytes([1, 2, 0, 0])  # two gaps, two lowest bytes


def of(section: Section) -> Patch:
    return msgspec.structs.replace(PATCH, section=section)


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        (b"\xff" * 20, "whose header would end at"),
        (b"\x03" + bytes(7) + b"\xc1\xc1\xc1", "malformed header"),
        (with_header(PATCH, BODY[:-1]), "ends before its patch"),
        (with_header(PATCH, BODY + b"\x00"), "1 bytes after"),
        (with_header(of(section(0, 4, 2)), BODY), "do not lead to 2"),
        (with_header(msgspec.structs.replace(PATCH, num_changed=1), BODY[:-1]), "do not lead to 1"),
        (with_header(of(section(-2, 10, 2)), BODY), "ends before its patch"),
        (with_header(of(section(0, 33, 2)), BODY), "not within 64 bytes"),
        (with_header(msgspec.structs.replace(PATCH, num_changed=2**62), BODY), "ends before its patch"),
        (with_header(of(section(0, 10, 8)), BODY), "elements of 8"),
        (with_header(msgspec.structs.replace(PATCH, gap_bytes=0), BODY), "gaps of 0"),
        (with_header(msgspec.structs.replace(PATCH, plane=2), BODY), "of byte 2 of elements of 2"),
        (with_header(msgspec.structs.replace(PATCH, plane=-1), BODY), "of byte -1"),
    ],
)
def test_what_is_no_delta_is_refused(delta: bytes, reason: str) -> None:
    with pytest.raises(WeightsError, match=reason):
        apply_delta(memoryview(delta), memoryview(bytearray(64)))


def test_what_those_deltas_were_made_of_is_one() -> None:
    assert applied(with_header(PATCH, BODY), b"\xff" * 64) == b"\xff\xff\x00\xff\xff\xff\xff\xff\x00\xff" + b"\xff" * 54
