"""Finds and reads files that the user provides. An error says which file is missing and where to get it."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.trajectory import Task

MAX_FILE_BYTES = 1 << 30

T = TypeVar("T")


def asset_path(option: str, path: str, *, fetch: str) -> Path:
    """Return `path`. Raises ValueError if it does not exist; `fetch` says what to get and where to put it."""
    if not path:
        raise ValueError(f"`env.options.{option}` must be set; {fetch}")
    if not Path(path).exists():
        raise ValueError(f"`env.options.{option}`: {path} does not exist; {fetch}")
    return Path(path)


def named_files(train: str, held_out: str, *, fetch: str) -> dict[str, str]:
    """Return the configured paths by split. Raises ValueError, with `fetch`, if neither is configured."""
    named = {split: path for split, path in (("train", train), ("held_out", held_out)) if path}
    return named or {"train": str(asset_path("train", "", fetch=fetch))}


@functools.lru_cache(maxsize=16)  # each episode makes a new environment
def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Return the records of a JSON Lines file, cached. Raises ValueError with the number of a malformed line."""
    records = []
    for number, line in enumerate(_content(path).splitlines(), 1):
        if line.strip():
            try:
                records.append(msgspec.json.decode(line, type=kind))
            except MALFORMED as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return records


@functools.lru_cache(maxsize=16)
def read_json(path: Path, kind: type[T]) -> T:
    """Return the content of a JSON file, cached. Raises ValueError if it is not of type `kind`."""
    try:
        return msgspec.json.decode(_content(path), type=kind)
    except MALFORMED as error:
        raise ValueError(f"{path}: {error}") from error


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
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} must have at most {MAX_FILE_BYTES} bytes, has {path.stat().st_size}; split the file")
    return path.read_bytes()
