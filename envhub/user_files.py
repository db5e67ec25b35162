"""Finds and reads files that the user provides. An error says which file is missing and where to get it."""

import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.trajectory import Task
from slipstream.common.rows.row_source import BadRow, Row, is_hub, whole_rows
from slipstream.envhub.task_seed import split_of

MAX_FILE_BYTES = 1 << 30

T = TypeVar("T")

log = logging.getLogger(__name__)


def row_source(option: str, name: str, *, fetch: str) -> Path | str:
    """The path of a file that exists, or the name of a data set on a hub. Raises ValueError for another name."""
    return name if is_hub(name) else asset_path(option, name, fetch=fetch)


def asset_path(option: str, path: str, *, fetch: str) -> Path:
    """Return `path`. Raises ValueError if it does not exist; `fetch` says what to get and where to put it."""
    if not path:
        raise ValueError(f"`env.options.{option}` must be set; {fetch}")
    if not Path(path).exists():
        raise ValueError(f"`env.options.{option}`: {path} does not exist; {fetch}")
    return Path(path)


def named_files(train: str, held_out: str, *, fetch: str) -> dict[str, Path]:
    """Return the configured paths by split. Raises ValueError, with `fetch`, without any, and if one is missing."""
    named = {split: path for split, path in (("train", train), ("held_out", held_out)) if path}
    return {split: asset_path(split, path, fetch=fetch) for split, path in (named or {"train": ""}).items()}


@functools.lru_cache(maxsize=16)  # each episode makes a new environment
def read_files(
    read: Callable[..., Sequence[Any]], train: str, held_out: str, *more: Hashable, fetch: str
) -> dict[str, Sequence[Any]]:
    """Return what `read` makes of each configured file and of `more`, by split, cached.

    Raises ValueError as `named_files`, and what `read` raises.
    """
    files = named_files(train, held_out, fetch=fetch)
    contents = {path: read(path, *more) for path in set(files.values())}
    return {split: contents[path] for split, path in files.items()}


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Return the records of a JSON Lines file. Raises ValueError with the number of a malformed line."""
    records = []
    for number, line in enumerate(_content(path).splitlines(), 1):
        if line.strip():
            try:
                records.append(msgspec.json.decode(line, type=kind))
            except MALFORMED as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not records:
        raise ValueError(f"{path} has no lines; a line is a task")
    return records


def read_records(path: Path, kind: type[T]) -> list[T]:
    """Return the rows of a .jsonl, .json or .parquet file. Raises ValueError with the number of a bad one."""
    records = []
    for number, row in read_rows(path):
        try:
            records.append(msgspec.convert({k: v for k, v in row.items() if v is not None}, kind, strict=False))
        except MALFORMED as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return records


def read_json(path: Path, kind: type[T]) -> T:
    """Return the content of a JSON file. Raises ValueError if it is not of type `kind`."""
    try:
        return msgspec.json.decode(_content(path), type=kind)
    except MALFORMED as error:
        raise ValueError(f"{path}: {error}") from error


def read_rows(source: Path | str) -> list[tuple[int, Row]]:
    """The numbered rows, each with every column of the file. Raises ValueError for a bad row, and without rows."""
    if isinstance(source, Path) and source.is_file() and source.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{source} must have at most {MAX_FILE_BYTES} bytes, has {source.stat().st_size}; split it")
    try:
        rows = list(whole_rows(source))
    except BadRow as error:
        raise ValueError(f"{source}, {error}") from None
    if not rows:
        raise ValueError(f"{source} has no rows; a row is a task")
    for number, row in rows:
        try:
            msgspec.msgpack.encode(row)
        except OverflowError:
            raise ValueError(f"{source}, row {number}: a whole number is beyond 64 bits; write it as text") from None
    columns = dict.fromkeys(name for _, row in rows for name in row)
    return [(number, columns | row) for number, row in rows]


@functools.lru_cache(maxsize=8)  # each episode makes a new environment
def read_tasks_of_rows(
    read: Callable[..., list[Any]], train: str, held_out: str, *more: Hashable, text: Callable[[Any], str], fetch: str
) -> dict[str, list[Any]]:
    """Return what `read` makes of each source of rows and of `more`, by split, cached.

    Without `held_out`, the text of a task decides its split, so that none is in both. It logs how many tasks two
    sources share. Raises ValueError if a split is empty, as `row_source`, and as `read`.
    """
    source = row_source("train", train, fetch=fetch)
    other = row_source("held_out", held_out, fetch=fetch) if held_out else source
    tasks = read(source, *more)
    others = read(other, *more) if held_out else []
    split: dict[str, list[Any]] = {"train": tasks, "held_out": others}
    if not held_out:
        split["train"] = []
        for task in tasks:
            split[split_of(text(task))].append(task)
    elif other != source:
        known = set(map(text, tasks))
        if shared := sum(text(task) in known for task in others):
            log.warning("%s: %d of %d tasks are also train tasks; remove them from one", held_out, shared, len(others))
    for name, found in split.items():
        if not found:
            raise ValueError(
                f"{train}: of its rows none is in the split {name}, as there are too few; add rows, or set "
                "`env.options.held_out`"
            )
    return split


def item_of(task: Task, items: Mapping[str, Sequence[T]]) -> T:
    """Return the item of `task`: its index, modulo the number of items. Raises ValueError if its split has no items."""
    if task.split not in ("train", "held_out"):
        raise ValueError(f"task {task.task_id}: split must be train or held_out, got {task.split!r}")
    found = items.get(task.split, ())
    if not found:
        raise ValueError(
            f"task {task.task_id}: there are no {task.split} tasks; "
            f"set `env.options.{task.split}` to the path of their file"
        )
    return found[task.index % len(found)]


def _content(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise ValueError(f"{path} must have at most {MAX_FILE_BYTES} bytes, has {size}; split the file")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give the path of a file") from error
