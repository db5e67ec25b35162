"""Writes rows to a .jsonl or .parquet file, completely or not at all."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import check_apart, held, remove_left, sync, whole_file
from slipstream.common.process.run_dir import run_of
from slipstream.common.rows.row_source import Row
from slipstream.tools.terminal.output_lines import json_line

RECORDS = ("metrics.jsonl", "samples.jsonl", "preferences.jsonl")  # of a run


@contextlib.contextmanager
def rows_to(path: Path, *, force: bool, inputs: Sequence[str] = ()) -> Iterator[None]:
    """Be the only process that writes rows to `path`, which must be free, and none of `inputs`. Raises ConfigError."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"the file name must end in .jsonl or .parquet, got {path}")
    check_writable(path, force=force)
    with held(path):
        check_writable(path, force=force)  # another process may have written it meanwhile
        check_apart([path], inputs)
        remove_left(path)
        yield


def check_writable(path: Path, *, force: bool) -> None:
    """Raise ConfigError unless `path` can become a file, or be replaced as one; `force` allows it to exist."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot write {path}: it exists and is not a regular file; choose another")
    if path.exists() and (run := run_of(path)) and (path.resolve().parent != run or path.name in RECORDS):
        raise ConfigError(f"cannot write {path}: it is a record of the run in {run}; choose another")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; choose another file, or overwrite it with --force")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a directory; create it, or choose another")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: its directory is not writable; choose another")


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write `rows` to `path`, completely or not at all. Raises ConfigError if it cannot be written."""
    try:
        with whole_file(path) as file:
            if path.suffix == ".parquet":
                from slipstream.tools.data.parquet_rows import write_parquet  # only .parquet files need pyarrow

                write_parquet(file, rows)
            else:
                file.writelines(json_line(row).encode() + b"\n" for row in rows)
            sync(file)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}; choose another file") from error
