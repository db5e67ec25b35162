"""Writes files and folders that appear whole or not at all, and reads JSON; one process at a time writes an output."""

import contextlib
import errno
import fcntl
import glob
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.wire import MALFORMED

T = TypeVar("T")

log = logging.getLogger(__name__)


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Be the only process that writes the file or folder `path`. Raises ConfigError where another one does.

    The lock is the file `path`.lock, which names the process. The kernel frees the lock of a process that has ended.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        descriptor = _locked(lock, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}: {lock}; choose another") from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(lock: Path, path: Path) -> int:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if not try_lock(descriptor, lock):
                owner = os.pread(descriptor, 512, 0).decode(errors="replace") or "another process"
                raise ConfigError(f"{owner} is writing {path}; wait for it, or end it")
            with contextlib.suppress(FileNotFoundError):  # its last owner may have removed it just now
                if os.path.samestat(os.fstat(descriptor), lock.stat()):
                    os.truncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def try_lock(descriptor: int, path: Path) -> bool:
    """Lock the open file `path`; return whether no other process has it. A file system without locks is logged."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        log.warning("%s cannot be locked (%s): let no second process write there", path, error)
    return True


def check_apart(outputs: Iterable[Path], inputs: Iterable[Path | str]) -> None:
    """Raise ConfigError if a file to write is also one to read, under whatever name."""
    sources = [Path(source) for source in inputs if os.path.exists(source)]  # noqa: PTH110 - a source may be a URL
    for path in outputs:
        for source in sources:
            if path.exists() and path.samefile(source):
                raise ConfigError(f"{path} would replace {source}, which is read; choose another file to write")


def appended(path: Path) -> BinaryIO:
    """Open `path` to read and to append, and make it if it is missing. Raises OSError for a link to another file."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "a+b")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which gets the name `path` when the block ends; after an error nothing is left of it.

    Only its owner can read it. Its temporary name is its own: no link is followed, and no other writer has it.
    """
    descriptor, unnamed = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        Path(unnamed).replace(path)
    except BaseException:
        Path(unnamed).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `path` when the block ends. What killed writers of it left is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in _left(path):
        shutil.rmtree(left, ignore_errors=True)
    unnamed = Path(tempfile.mkdtemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp"))
    try:
        yield unnamed
        shutil.rmtree(path, ignore_errors=True)
        unnamed.rename(path)
    except BaseException:
        shutil.rmtree(unnamed, ignore_errors=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace `path` atomically: a reader sees the old content or the new one, also after a crash or on a full disk."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        sync(file)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` atomically with `value` as JSON."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path, kind: type[T], *, cure: str) -> T:
    """The JSON in `path`, of type `kind`. Raises ConfigError, which names the file and ends with `cure`, what to do."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *MALFORMED) as error:
        raise ConfigError(f"{path} is damaged: {error}; {cure}") from error


def remove_left(path: Path) -> None:
    """Remove the temporary files of killed writers of `path`, which the caller holds."""
    for left in _left(path):
        left.unlink(missing_ok=True)


def _left(path: Path) -> Iterator[Path]:
    """What writers of `path` have under temporary names, as `tempfile` makes them."""
    return path.parent.glob(f"{glob.escape(path.name)}.????????.tmp")


def sync(file: BinaryIO) -> None:
    """Make what was written to `file` durable."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flush a file's bytes, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
