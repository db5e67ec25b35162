"""The blobs that a relay has, by root hash: the model's files, and those of the newest version and the one before."""

import threading
from collections.abc import Sequence

from slipstream.actors.weights.fetch import Bytes
from slipstream.common.transfer.chunks import Blob, ChunkRequest
from slipstream.common.transfer.weights import Manifest, blobs


class Holdings:
    """The blobs of the model's files and of at most two versions, which share most of them. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blobs: dict[str, Bytes] = {}
        self._manifest: Manifest | None = None  # of the newest complete version

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the newest complete version, or None before the first one."""
        with self._lock:
            return self._manifest

    def roots(self) -> list[str]:
        """The roots of all blobs, sorted."""
        with self._lock:
            return sorted(self._blobs)

    def get(self, root: str) -> Bytes | None:
        """One blob; None if the relay does not have it."""
        with self._lock:
            return self._blobs.get(root)

    def read(self, request: ChunkRequest) -> memoryview | None:
        """The requested bytes without a copy, valid after the blob is removed too; None if the blob is missing."""
        held = self.get(request.root)
        return None if held is None else held.data[request.offset : request.offset + request.num_bytes]

    def make_room(self, manifest: Manifest, files: Sequence[Blob]) -> None:
        """Remove the blobs that are not `files`, and that neither the newest complete version nor `manifest` needs."""
        with self._lock:
            versions = [blob for each in (self._manifest, manifest) if each for blob in blobs(each)]
            needed = {blob.root for blob in [*files, *versions]}
            self._blobs = {root: held for root, held in self._blobs.items() if root in needed}

    def add(self, root: str, verified: Bytes) -> None:
        """Add a verified blob, which others can pull from now on."""
        with self._lock:
            self._blobs[root] = verified

    def complete(self, manifest: Manifest) -> None:
        """Make this version the newest complete one. The blobs of the version before stay, for pulls in progress."""
        with self._lock:
            self._manifest = manifest

    def drop(self, root: str) -> None:
        """Remove a corrupt blob; then no version is complete."""
        with self._lock:
            self._blobs.pop(root, None)
            self._manifest = None
