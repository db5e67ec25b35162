"""Reads the rows of a .jsonl, .json or .parquet file, or of a data set on a hub.

A few rows are in memory at a time; of a .json file, all are. All formats give the same values. Arrow has one type for a
column, so it adds a null where another row has a field, and makes 1 to 1.0 where another row has 1.5; and all its
objects have their fields in one order. So in every file a field that is null is no field, a whole number has no
fraction, and the fields of an object have the same order. What is in a JSON text stays as it is, and so does a null in
a list.
"""

import datetime
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from slipstream.common.process.config_error import ConfigError, reason

HUB = "hub:"  # what the name of a data set on a hub begins with
MAX_LINE_BYTES = 64 << 20
BATCH_ROWS = 64  # of a parquet file, in memory at a time
FIRST = ("type", "function", "name", "description", "parameters")  # fields of an object, before the others by name
MAX_WHOLE = 1 << 53  # a larger number need not be exact as a float
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escaped half of a character
Row = dict[str, Any]


class BadRow(ValueError):
    """A row that cannot be read; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One row of a file, or why it cannot be read."""

    number: int  # from 1; of a .jsonl file, that of its line
    row: Row
    fault: str = ""
    text: str = ""  # of a row that cannot be read


def is_hub(source: Path | str) -> bool:
    """Whether `source` names a data set on a hub."""
    return str(source).startswith(HUB)


def read_lines(source: Path | str) -> Iterator[Line]:
    """Yield the rows of `source`. Raises ConfigError if it cannot be read."""
    if is_hub(source):
        yield from _hub(str(source))
        return
    path = Path(source)
    try:
        match path.suffix:
            case ".jsonl":
                yield from _jsonl(path)
            case ".json":
                yield from _json(path)
            case ".parquet":
                yield from _parquet(path)
            case _:
                raise ConfigError(f"{path}: the name must end in .jsonl, .json or .parquet; rename or convert the file")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; correct the path or the file") from error


def whole_rows(source: Path | str) -> Iterator[tuple[int, Row]]:
    """Every row with its number. Raises BadRow for the first that cannot be read, and ConfigError."""
    for line in read_lines(source):
        if line.fault:
            raise BadRow(f"line {line.number} {line.fault}")
        yield line.number, line.row


def plain(value: Any) -> Any:
    """A value of JSON in the form that every file gives it. Raises BadRow for any other value."""
    match value:
        case None | str() | bool() | int():
            return value
        case float():
            return int(value) if value.is_integer() and abs(value) <= MAX_WHOLE else value
        case dict():
            names = sorted(value, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), str(name)))
            return {str(name): plain(value[name]) for name in names if value[name] is not None}
        case list() | tuple():
            return [plain(each) for each in value]
        case Decimal() if value.is_finite() and Decimal(repr(float(value))) == value:
            return plain(float(value))
        case datetime.date() | datetime.time():  # also a date with a time: midnight is what datasets makes of a date
            return value.isoformat().removesuffix("T00:00:00")
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                pass
    raise BadRow(f"{value!r:.80} of type {type(value).__name__} is no value of JSON; write it as text or leave it out")


def _plain_line(number: int, row: Row) -> Line:
    """The line of a row in which a null column stays: a file of several shapes has them in both formats."""
    read = Row()
    for name, value in row.items():
        try:
            read[str(name)] = plain(value)
        except BadRow as error:
            return Line(number=number, row={}, fault=f"has a column {name!r} that cannot be read: {error}")
    return Line(number=number, row=read)


def _jsonl(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        number = 0
        while text := file.readline(MAX_LINE_BYTES):
            number += 1
            rest = text
            while len(rest) == MAX_LINE_BYTES and not rest.endswith(b"\n"):
                text, rest = b"", file.readline(MAX_LINE_BYTES)
            if not text:
                yield Line(number=number, row={}, fault=f"is longer than {MAX_LINE_BYTES} bytes")
            elif text.removeprefix(b"\xef\xbb\xbf").strip():  # a blank line is no row
                yield _line(number, text)


def _json(path: Path) -> Iterator[Line]:
    """The rows of one array; of another file, those of its lines. Raises ConfigError."""
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not text[:1000].lstrip().startswith(b"["):
        yield from _jsonl(path)
        return
    try:
        rows = json.loads(text.decode(), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read as a JSON array: {error}; restore it from a copy, or write it again"
        ) from error
    for number, row in enumerate(rows, 1):
        yield _line(number, json.dumps(row).encode())


def _line(number: int, text: bytes) -> Line:
    shown = text[:2000].decode(errors="replace")
    try:
        row = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_object)
        if _SURROGATE.search(text):
            json.dumps(row, ensure_ascii=False).encode()  # pairs of them are a character; halves raise
        if isinstance(row, dict):
            return _plain_line(number, row)
        fault = f"must be a JSON object, got a {type(row).__name__}"
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        fault = f"has half a character, {half}; complete or remove it"
    except RecursionError:
        fault = "is nested too deeply"
    except ValueError as error:
        fault = f"is not JSON: {error}"
    return Line(number=number, row={}, fault=fault, text=shown)


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """An object of JSON. Raises ValueError for a name that it has twice: readers differ in which value counts."""
    _check_once([name for name, _ in pairs])
    return dict(pairs)


def _check_once(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"it has {max(names, key=names.count)!r:.80} twice; keep one of them")


def _parquet(path: Path) -> Iterator[Line]:
    import pyarrow as pa  # only .parquet files need pyarrow
    import pyarrow.parquet as pq

    num_read = 0
    try:
        with pq.ParquetFile(path) as file:
            _check_once(file.schema_arrow.names)
            for batch in file.iter_batches(BATCH_ROWS):
                for row in batch.to_pylist(maps_as_pydicts="lossy"):
                    num_read += 1
                    yield _plain_line(num_read, row)
    except MemoryError as error:  # Arrow's own too
        raise ConfigError(
            f"{path}, after row {num_read}: its next {BATCH_ROWS} rows do not fit into memory; write them in smaller "
            "columns, or as .jsonl, of which one row is in memory at a time"
        ) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read after row {num_read}: {reason(error)}; restore it from a copy, or write it again"
        ) from error


def _hub(name: str) -> Iterator[Line]:
    """The rows of `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`, by the package datasets. Raises ConfigError."""
    parts = name.removeprefix(HUB).split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise ConfigError(
            f"{name!r} must be hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT, as in hub:openai/gsm8k:main:train"
        )
    path, *config, split = parts
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{name} needs the package datasets, which cannot be imported: {error}; install the extra `hub`, or "
            "run `pip install datasets`, on every host that reads it"
        ) from error
    try:
        rows = datasets.load_dataset(path, *config, split=split)
        for number, row in enumerate(rows, 1):
            yield _plain_line(number, row)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
