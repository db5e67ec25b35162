"""Reads and writes files of trajectories: length-prefixed frames."""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from slipstream.common.process.output import sync, whole_file
from slipstream.common.process.wire import MAX_FRAME_BYTES, WireError, encode
from slipstream.common.records.trajectory import Trajectory, decode_trajectory

_LENGTH = struct.Struct("<I")


def write(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Replace `path` by a file of `trajectories`, completely or not at all, and make it durable."""
    with whole_file(path) as file:
        write_frames(file, (encode(trajectory, compress=True) for trajectory in trajectories))
        sync(file)


def read(path: Path, *, vocab_size: int) -> Iterator[Trajectory]:
    """Yield each trajectory in order. Raises WireError if the file is truncated or malformed."""
    for frame in read_frames(path):
        yield decode_trajectory(frame, max_bytes=MAX_FRAME_BYTES, vocab_size=vocab_size)


def write_frames(file: BinaryIO, frames: Iterable[bytes]) -> None:
    """Write each frame after its length."""
    for frame in frames:
        file.write(_LENGTH.pack(len(frame)) + frame)


def read_frames(path: Path, *, max_bytes: int = MAX_FRAME_BYTES) -> Iterator[bytes]:
    """Yield each frame in order. Raises WireError if the file is truncated or declares a frame over `max_bytes`."""
    with path.open("rb") as file:
        while prefix := file.read(_LENGTH.size):
            if len(prefix) < _LENGTH.size:
                raise WireError(f"{path} is truncated: it ends inside the length of a frame")
            (num_bytes,) = _LENGTH.unpack(prefix)
            if num_bytes > max_bytes:
                raise WireError(f"{path} declares a frame of {num_bytes} bytes, the limit is {max_bytes}")
            frame = file.read(num_bytes)
            if len(frame) < num_bytes:
                raise WireError(f"{path} is truncated: it ends inside a frame, after {len(frame)} of {num_bytes} bytes")
            yield frame
