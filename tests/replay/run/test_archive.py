"""An archive is read as it was written; one that was cut short says so, after what is whole."""

import struct
from pathlib import Path

import msgspec
import pytest

from slipstream.common.process.wire import MAX_FRAME_BYTES, WireError
from slipstream.common.records import frame_file
from slipstream.common.records.trajectory import InvalidTrajectory, Trajectory
from tests.common.records.test_trajectory import VOCAB_SIZE, WHOLE

MEMBERS = [msgspec.structs.replace(WHOLE, member=member) for member in range(3)]


@pytest.mark.parametrize("members", [MEMBERS, []], ids=["three", "none"])
def test_what_is_written_is_read_in_order(tmp_path: Path, members: list[Trajectory]) -> None:
    path = tmp_path / "episodes.bin"
    frame_file.write(path, members)
    assert list(frame_file.read(path, vocab_size=VOCAB_SIZE)) == members


@pytest.mark.parametrize(
    ("tail", "complaint"),
    [
        (b"\x01\x02", "ends inside the length of a frame"),
        (struct.pack("<I", 100) + bytes(40), "ends inside a frame, after 40 of 100 bytes"),
        (struct.pack("<I", MAX_FRAME_BYTES + 1), f"declares a frame of {MAX_FRAME_BYTES + 1} bytes, the limit is"),
        (struct.pack("<I", 12) + b"not a frame.", "frame has magic b'no'"),
    ],
)
def test_a_damaged_end_is_refused_after_what_is_whole(tmp_path: Path, tail: bytes, complaint: str) -> None:
    path = tmp_path / "episodes.bin"
    frame_file.write(path, MEMBERS[:1])
    with path.open("ab") as file:
        file.write(tail)
    reading = frame_file.read(path, vocab_size=VOCAB_SIZE)
    assert next(reading) == MEMBERS[0]
    with pytest.raises(WireError, match=complaint):
        next(reading)


def test_an_archive_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "episodes.bin"
    frame_file.write(path, MEMBERS)
    with pytest.raises(InvalidTrajectory, match="vocabulary is"):
        next(frame_file.read(path, vocab_size=50))
