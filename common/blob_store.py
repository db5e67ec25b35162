"""Blobs as files, each named by its root, on a path or an object store: whatever fsspec knows by its URL."""

import contextlib
import re
from collections.abc import Iterable, Iterator

import fsspec

from common.chunks import Blob
from common.config_error import ConfigError

READ_BYTES = 16 << 20  # at a time
_ROOT = re.compile(r"[0-9a-f]{32}")


class StoreError(RuntimeError):
    """The store cannot be reached, is full, or does not have what it should."""


class BlobStore:
    """A folder of blobs. Nothing here looks into them: who reads one checks it."""

    def __init__(self, url: str) -> None:
        """`url` is a path or what fsspec takes, such as s3://bucket/folder; it may hold no secret, as errors name it.

        Raises ConfigError for a URL of a kind that cannot be had here.
        """
        try:
            self._files, self._folder = fsspec.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"`weights.disk` {url}: {error}; use a path, or install what fsspec asks for") from error

    def write(self, blob: Blob, chunks: Iterable[bytes]) -> None:
        """Write `blob`; until that is done it may be there in part. Raises StoreError, and what `chunks` raises."""
        path = self._path(blob.root)
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
        """Fill `buffer`, of `blob.num_bytes`. Raises StoreError."""
        position, path = 0, self._path(blob.root)
        with _asked_for(path), self._files.open(path, "rb", block_size=READ_BYTES) as file:
            while position < blob.num_bytes and (data := file.read(min(READ_BYTES, blob.num_bytes - position))):
                buffer[position : position + len(data)] = data
                position += len(data)
        if position != blob.num_bytes:
            raise StoreError(f"{path} ends after {position} of {blob.num_bytes} bytes")

    def keep(self, roots: set[str]) -> None:
        """Remove every other blob, and nothing that is none. Raises StoreError."""
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
    """What fsspec raises is a StoreError: each kind of store has errors of its own, few of them an OSError."""
    try:
        yield
    except Exception as error:
        raise StoreError(f"{path}: {type(error).__name__}: {error}") from error


def run_store(url: str, run_id: str) -> BlobStore:
    """What the run of this name keeps under `weights.disk`."""
    return BlobStore(f"{url.rstrip('/')}/{run_id}")
