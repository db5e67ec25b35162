"""The files of `slipstream data` while they are written, and how far that is: a call that was killed is continued.

    NAME.tmp                  each file of the result, until it gets its name
    FILE.waiting.jsonl.tmp    rows that wait for a judge
    FILE.seen.tmp             hashes of the rows so far, by which repeats are found
    FILE.minima.tmp           the same for near-duplicates
    FILE.jsonl.lock           names the process that writes these files
    FILE.progress.json        the counts of the rows so far, and the bytes of each of these files that belong to them

`save` makes the files durable first. What they have beyond that is cut off, and written again.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import xxhash

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import appended, held, remove_left, sync, write_whole
from slipstream.common.process.wire import MALFORMED
from slipstream.common.rows.row_source import is_hub
from slipstream.tools.data.data_counts import Counts
from slipstream.tools.data.row_files import check_writable
from slipstream.tools.terminal.output_lines import json_line


class SourceState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of rows as it was when the call began."""

    path: str
    num_bytes: int
    xxh3: str

    @classmethod
    def of(cls, path: Path) -> "SourceState":
        """Read the file once. Its hash takes a fraction of the time of its rows."""
        if is_hub(path):
            return cls(path=str(path), num_bytes=0, xxh3="")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128)
            return cls(path=str(path), num_bytes=file.tell(), xxh3=digest.hexdigest())


class Progress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a call is, and what its result depends on."""

    settings: list[str]  # by which rows are read
    sources: list[SourceState]
    counts: Counts
    lengths: dict[str, int]  # bytes of each file, by its name
    late: list[str] = []  # the settings by which rows that waited were kept, once the result is whole
    is_whole: bool = False  # only the names of the files are missing


class Written:
    """A file that is appended to."""

    def __init__(self, path: Path, *, length: int) -> None:
        """Continue after the first `length` bytes. Raises ConfigError if the file has fewer."""
        self.path, self.length = path, length
        num_bytes = path.stat().st_size if path.exists() else 0
        if num_bytes < length:
            raise ConfigError(
                f"{path} is damaged: it has {num_bytes} of {length} bytes; remove the progress file beside it to begin "
                "again"
            )
        self.file = appended(path)
        self.file.truncate(length)

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield the bytes that the file had when it was opened, `size` at a time."""
        if self.length:
            with self.path.open("rb") as file:
                for start in range(0, self.length, size):
                    yield file.read(min(size, self.length - start))

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.length += len(data)


class DataFiles:
    """The files of one result. Without `finish` they stay as they were saved; those never saved are removed."""

    def __init__(self, path: Path) -> None:
        self.kept = path
        self.held_out = path.with_suffix(".held-out.jsonl")
        self.quarantine = path.with_suffix(".quarantine.jsonl")
        self.marks = path.with_suffix(".marks.jsonl")
        self.waiting = path.with_suffix(".waiting.jsonl")  # this and the next two never get these names
        self.seen = path.with_suffix(".seen")
        self.minima = path.with_suffix(".minima")
        self.state = path.with_suffix(".progress.json")
        self.saved: Progress | None = None
        self._written: dict[Path, Written] = {}
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> "DataFiles":
        """Raises ConfigError if another process writes these files, or the progress file is damaged."""
        with contextlib.ExitStack() as lock:
            for path in self.outputs:
                lock.enter_context(held(path))
            remove_left(self.state)
            if self.state.exists():
                try:
                    self.saved = msgspec.json.decode(self.state.read_bytes(), type=Progress)
                except MALFORMED as error:
                    raise ConfigError(f"{self.state} is damaged: {error}; remove it to begin again") from None
            self._lock = lock.pop_all()
        return self

    def check_free(self, *, force: bool) -> None:
        """Raise ConfigError unless `finish` can write or remove the files of a result; `force` allows them to exist."""
        for path in (self.kept, self.held_out, self.quarantine):
            check_writable(path, force=force or self.is_whole)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for written in self._written.values():
            with contextlib.suppress(OSError):  # a full disk refuses the rest of a buffer
                written.file.close()
        if not self.state.exists():
            self._remove(self.held_out, self.quarantine, self.kept, self.waiting, self.seen, self.minima)
        self._lock.close()

    @property
    def outputs(self) -> list[Path]:
        """The files that a call may write."""
        return [self.kept, self.held_out, self.quarantine, self.marks, self.state]

    @property
    def is_whole(self) -> bool:
        """Whether a call before has only left to give the files their names."""
        return self.saved is not None and self.saved.is_whole

    def continued(self, settings: list[str], late: list[str], sources: list[SourceState]) -> Progress:
        """What was saved, or the beginning. Raises ConfigError if that is of another call."""
        saved = self.saved
        if saved is None:
            self.saved = Progress(settings=settings, sources=sources, counts=Counts(), lengths={})
            return self.saved
        cure = f"give the same to continue, or remove {self.state} to begin again"
        of_before, of_now = saved.settings + saved.late, settings + (late if self.is_whole else [])
        if of_before != of_now:
            before = " ".join(sorted(set(of_before) - set(of_now))) or "the default"
            now = " ".join(sorted(set(of_now) - set(of_before))) or "the default"
            raise ConfigError(f"{self.state} is of an unfinished call with {before}, and this one has {now}; {cure}")
        if saved.sources != sources:
            raise ConfigError(
                f"{self.state} is of an unfinished call with {_named(saved.sources)}, and this one has "
                f"{_named(sources)}; {cure}"
            )
        for name in () if self.is_whole else saved.lengths:
            self.opened(self.kept.with_name(name))
        return saved

    def opened(self, path: Path) -> Written:
        """The file that gets the name `path`."""
        if path not in self._written:
            length = self.saved.lengths.get(path.name, 0) if self.saved else 0
            self._written[path] = Written(_half(path), length=length)
        return self._written[path]

    def write(self, path: Path, record: dict[str, Any]) -> None:
        self.opened(path).write(json_line(record).encode() + b"\n")

    def waiting_rows(self) -> Path | None:
        """The file with the rows that wait for the judge, all written; None if no row waits."""
        if self.waiting not in self._written:
            return None
        self._written[self.waiting].file.flush()
        return _half(self.waiting)

    def save(self, *, late: list[str] | None = None, is_whole: bool = False) -> None:
        """Make all that was written durable, and record it, so that another call continues here."""
        assert self.saved is not None
        for written in self._written.values():
            sync(written.file)
        lengths = {path.name: written.length for path, written in self._written.items()}
        self.saved = msgspec.structs.replace(self.saved, lengths=lengths, late=late or [], is_whole=is_whole)
        write_whole(self.state, msgspec.json.encode(self.saved).decode())

    def finish(self) -> None:
        """Give the saved files their names, and remove all others: also those that an earlier result had."""
        assert self.saved is not None
        for path in (self.held_out, self.quarantine, self.kept):
            if path.name not in self.saved.lengths:
                path.unlink(missing_ok=True)
            elif _half(path).exists():  # else the call before has done it
                _half(path).replace(path)
        self._remove(self.waiting, self.seen, self.minima)
        self.state.unlink()

    def discard(self) -> None:
        """Forget what was saved: it cannot be continued."""
        self.state.unlink(missing_ok=True)

    def _remove(self, *paths: Path) -> None:
        for path in paths:
            _half(path).unlink(missing_ok=True)


def _half(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _named(sources: list[SourceState]) -> str:
    return ", ".join(f"{each.path} ({each.num_bytes} bytes, xxh3 {each.xxh3[:8]})" for each in sources)
