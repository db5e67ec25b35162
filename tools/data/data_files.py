"""The files of `slipstream data` while they are written: all get their names at the end, or none does."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.common.process.output import check_apart, held, remove_left, sync, whole_file
from slipstream.tools.data.row_files import check_writable
from slipstream.tools.terminal.output_lines import json_line


class DataFiles:
    """The files of one result, each made when its first row is written."""

    def __init__(self, path: Path) -> None:
        self.kept = path
        self.held_out = path.with_suffix(".held-out.jsonl")
        self.quarantine = path.with_suffix(".quarantine.jsonl")
        self.marks = path.with_suffix(".marks.jsonl")
        self._files: dict[Path, BinaryIO] = {}
        self._writing = contextlib.ExitStack()

    @contextlib.contextmanager
    def written(self, *, force: bool, inputs: Sequence[str]) -> Iterator[None]:
        """Be the only process that writes these files; at the end they replace those of an earlier result.

        Raises ConfigError if another process writes them, if one is among `inputs`, or if one exists without `force`.
        """
        result = [self.kept, self.held_out, self.quarantine]
        with contextlib.ExitStack() as locks:
            for path in (*result, self.marks):
                locks.enter_context(held(path))
            for path in result:
                check_writable(path, force=force)
                remove_left(path)
            check_apart([*result, self.marks], inputs)
            with self._writing:
                yield
                for file in self._files.values():
                    sync(file)
            for path in result:
                if path not in self._files:
                    path.unlink(missing_ok=True)

    def write(self, path: Path, record: dict[str, Any]) -> None:
        if path not in self._files:
            self._files[path] = self._writing.enter_context(whole_file(path))
        self._files[path].write(json_line(record).encode() + b"\n")
