"""The answers of a judge for the rows of `slipstream data`, in a journal beside the result.

Each is appended at once, with what was spent until then. So the same command continues after a failure: it asks nothing
again, and its budget is not new.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.wire import MALFORMED


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the journal: the marks of a row, and what was spent until then."""

    asked: str  # the digest of what the judge was shown, and of how it was asked
    marks: dict[str, float]  # by name
    spent: tuple[int, int, float]  # requests, tokens, money


def entries_of(file: BinaryIO, path: Path) -> Iterator[Entry]:
    """Yield each entry of the journal in `file`. Raises ConfigError for a damaged line.

    A last line that was cut off, as the process was killed, is removed.
    """
    file.seek(0)
    start = 0
    for number, line in enumerate(iter(file.readline, b""), start=1):
        if not line.endswith(b"\n"):
            file.truncate(start)
            break
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except MALFORMED as error:
            raise ConfigError(f"{path}, line {number} is damaged: {error}; remove the line") from None
        yield entry
        start += len(line)


def append_entry(file: BinaryIO, entry: Entry) -> None:
    file.seek(0, 2)
    file.write(msgspec.json.encode(entry) + b"\n")
    file.flush()
