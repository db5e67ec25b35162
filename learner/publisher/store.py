"""What the publisher keeps on disk: the newest version's blobs, for actors that read them there.

It goes on beside the broadcasts and pulls, as slowly as the disk is. A version that was not begun when a newer one
comes is overtaken. Blobs are written first; then the version is announced, on a board of its own; then older blobs go.
"""

import logging
import threading
from collections.abc import Callable, Iterator

import redis

from common.blob_store import BlobStore, StoreError
from common.chunks import Blob, ChunkRequest
from common.weights import Manifest, Offer, blobs
from replay.bulletin import Bulletin
from replay.keys import FencedOut

log = logging.getLogger(__name__)

RETRY_S = 5.0


class Gone(RuntimeError):
    """A blob is no longer served: newer versions are."""


class StoreWriter:
    """Writes what it is given, by a thread of its own."""

    def __init__(
        self,
        store: BlobStore,
        bulletin: Bulletin,
        read: Callable[[ChunkRequest], bytes | None],
        *,
        chunk_bytes: int,
    ) -> None:
        """`read` returns bytes of a blob; None when it is not served any more."""
        self._store = store
        self._bulletin = bulletin
        self._read = read
        self._chunk_bytes = chunk_bytes
        self._changed = threading.Condition()
        self._pending: Manifest | None = None
        self._stopping = False
        self._kept: set[str] = set()  # of the version announced before
        self._written: set[str] = set()
        self._writing = threading.Thread(target=self._write_versions, name="store-weights", daemon=True)
        self._writing.start()

    @property
    def alive(self) -> bool:
        return self._writing.is_alive()

    def submit(self, manifest: Manifest) -> None:
        """Have this version written; an older one that was not begun is overtaken."""
        with self._changed:
            self._pending = manifest
            self._changed.notify()

    def close(self) -> None:
        """Write what is pending and end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._writing.join()

    def _write_versions(self) -> None:
        while (manifest := self._take()) is not None:
            try:
                self._write(manifest)
            except (Gone, FencedOut) as error:
                log.warning("version %d does not come to disk: %s", manifest.policy_version, error)
            except (StoreError, redis.RedisError) as error:
                log.warning("version %d is not on disk yet: %s", manifest.policy_version, error)
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
        self._bulletin.announce_stored(Offer(manifest=manifest, pull_endpoint=""))
        roots = {blob.root for blob in parts}
        self._written &= roots | self._kept
        self._store.keep(roots | self._kept)  # for who has begun to read the version before
        self._kept = roots

    def _chunks(self, blob: Blob) -> Iterator[bytes]:
        for offset in range(0, blob.num_bytes, self._chunk_bytes):
            num_bytes = min(self._chunk_bytes, blob.num_bytes - offset)
            chunk = self._read(ChunkRequest(root=blob.root, offset=offset, num_bytes=num_bytes))
            if chunk is None:
                raise Gone(f"{blob.root} is no longer served")
            yield chunk

    def _try_again(self, manifest: Manifest) -> None:
        """After a pause, unless a newer version has come."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending is not None or self._stopping, RETRY_S)
            if self._pending is None and not self._stopping:
                self._pending = manifest
