"""Writes the newest version to a store (a disk or fsspec URL), for actors that read weights from there.

It works in the background, at the speed of the store. A version that was not begun when a newer one arrives is skipped.
Blobs are written first; then the version is announced under a separate key; then older blobs are removed.
"""

import logging
import threading
from collections.abc import Callable, Iterator

import redis

from slipstream.common.transfer.blob_store import BlobStore, StoreError
from slipstream.common.transfer.chunks import Blob, ChunkRequest
from slipstream.common.transfer.weights import Manifest, Offer, blobs
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.records.keys import FencedOut

log = logging.getLogger(__name__)

RETRY_S = 5.0


class BlobGone(RuntimeError):
    """A blob is no longer served, because there are newer versions."""


class StoreWriter:
    """Writes submitted versions to the store, in a background thread."""

    def __init__(
        self,
        store: BlobStore,
        bulletin: Bulletin,
        read: Callable[[ChunkRequest], bytes | None],
        *,
        chunk_bytes: int,
    ) -> None:
        """`read` returns bytes of a blob; None if the blob is no longer served."""
        self._store = store
        self._bulletin = bulletin
        self._read = read
        self._chunk_bytes = chunk_bytes
        self._changed = threading.Condition()
        self._pending: Manifest | None = None
        self._stopping = False
        self._kept: set[str] = set()  # blobs of the version announced last
        self._written: set[str] = set()
        self._writing = threading.Thread(target=self._write_versions, name="store-weights", daemon=True)
        self._writing.start()

    @property
    def alive(self) -> bool:
        return self._writing.is_alive()

    def submit(self, manifest: Manifest) -> None:
        """Write this version in the background; an older pending version is skipped."""
        with self._changed:
            self._pending = manifest
            self._changed.notify()

    def close(self) -> None:
        """Write the pending version, then stop."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._writing.join()

    def _write_versions(self) -> None:
        while (manifest := self._take()) is not None:
            try:
                self._write(manifest)
            except (BlobGone, FencedOut) as error:
                log.warning("version %d is not written to the store: %s", manifest.policy_version, error)
            except (StoreError, redis.RedisError) as error:
                log.warning(
                    "could not write version %d to the store; retrying in %g s: %s",
                    manifest.policy_version,
                    RETRY_S,
                    error,
                )
                self._try_again(manifest)

    def _take(self) -> Manifest | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending is not None or self._stopping)
            taken, self._pending = self._pending, None
            return taken

    def _write(self, manifest: Manifest) -> None:
        parts = blobs(manifest)
        for blob in parts:
            if blob.root not in self._written:
                self._store.write(blob, self._chunks(blob))
                self._written.add(blob.root)
        self._bulletin.announce(Offer(manifest=manifest, pull_endpoint=""), board="stored")
        roots = {blob.root for blob in parts}
        self._written &= roots | self._kept
        self._store.keep(roots | self._kept)  # keep the last version too, for actors that are reading it
        self._kept = roots

    def _chunks(self, blob: Blob) -> Iterator[bytes]:
        for offset in range(0, blob.num_bytes, self._chunk_bytes):
            num_bytes = min(self._chunk_bytes, blob.num_bytes - offset)
            chunk = self._read(ChunkRequest(root=blob.root, offset=offset, num_bytes=num_bytes))
            if chunk is None:
                raise BlobGone(f"blob {blob.root} is no longer served; there is a newer version")
            yield chunk

    def _try_again(self, manifest: Manifest) -> None:
        """Make the version pending again after a pause, unless a newer one has arrived."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending is not None or self._stopping, RETRY_S)
            if self._pending is None and not self._stopping:
                self._pending = manifest
