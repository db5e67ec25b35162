"""Stores blobs as files, named by their root hash, in a folder or an object store that fsspec supports."""

import contextlib
import re
from collections.abc import Iterable, Iterator

import fsspec

from slipstream.common.process.config_error import ConfigError
from slipstream.common.transfer.chunks import Blob

READ_BYTES = 16 << 20  # at a time
_ROOT = re.compile(r"[0-9a-f]{32}")


class StoreError(RuntimeError):
    """The store does not answer or is full, or a blob is missing or incomplete."""


class BlobStore:
    """A folder of blobs. It does not check their bytes; the reader does."""

    def __init__(self, url: str) -> None:
        """`url` is a path or an fsspec URL such as s3://bucket/folder. It must not contain a secret: errors show it.

        Raises ConfigError if fsspec does not support this kind of URL, or lacks a package for it.
        """
        try:
            self._files, self._folder = fsspec.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"`weights.disk` {url} cannot be used: {error}; use a path, or install the package that fsspec needs"
            ) from error

    def write(self, blob: Blob, chunks: Iterable[bytes]) -> None:
        """Write `blob`; of an interrupted write nothing stays, unless the process is killed or the store is away.

        Raises StoreError and what `chunks` raises.
        """
        path, is_whole = self._path(blob.root), False
        try:
            self._write(path, chunks)
            is_whole = True
        finally:
            if not is_whole:  # each version has another name: on a full or slow store parts would pile up
                with contextlib.suppress(StoreError), _asked_for(path):
                    self._files.rm_file(path)

    def _write(self, path: str, chunks: Iterable[bytes]) -> None:
        with _asked_for(path):
            self._files.makedirs(self._folder, exist_ok=True)
            file = self._files.open(path, "wb")
        try:
            for chunk in chunks:
                with _asked_for(path):
                    file.write(chunk)
        finally:
            with _asked_for(path):
                file.close()

    def read(self, blob: Blob, buffer: memoryview) -> None:
        """Read `blob` into `buffer`, which has its size. Raises StoreError."""
        position, path = 0, self._path(blob.root)
        with _asked_for(path), self._files.open(path, "rb", block_size=READ_BYTES) as file:
            while position < blob.num_bytes and (data := file.read(min(READ_BYTES, blob.num_bytes - position))):
                buffer[position : position + len(data)] = data
                position += len(data)
        if position != blob.num_bytes:
            raise StoreError(f"{path} is incomplete: it has {position} of {blob.num_bytes} bytes")

    def keep(self, roots: set[str]) -> None:
        """Remove every blob except `roots`, and no other file. Raises StoreError."""
        with _asked_for(self._folder):
            self._files.invalidate_cache()
            for path in self._files.ls(self._folder, detail=False):
                name = path.rsplit("/", 1)[-1]
                if _ROOT.fullmatch(name) and name not in roots:
                    self._files.rm_file(path)

    def _path(self, root: str) -> str:
        return f"{self._folder}/{root}"


@contextlib.contextmanager
def _asked_for(path: str) -> Iterator[None]:
    """Turn every error of fsspec into a StoreError: each kind of store raises its own types, few of them OSErrors."""
    try:
        yield
    except Exception as error:
        raise StoreError(f"{path}: {type(error).__name__}: {error}") from error


def run_store(url: str, run_id: str) -> BlobStore:
    """The store of the run `run_id` under `weights.disk`."""
    return BlobStore(f"{url.rstrip('/')}/{run_id}")
