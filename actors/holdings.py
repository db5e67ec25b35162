"""What a relay holds: blobs by their root hash, those of the newest version and those of the one before."""

import threading

from actors.fetch import Bytes
from common.chunks import ChunkRequest
from common.weights import Manifest, blobs


class Holdings:
    """For all threads. There is never more here than two versions are made of; they share most of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blobs: dict[str, Bytes] = {}
        self._manifest: Manifest | None = None  # of the newest version that is whole here

    @property
    def manifest(self) -> Manifest | None:
        """Of the newest version that is whole here."""
        with self._lock:
            return self._manifest

    def roots(self) -> list[str]:
        """Of all that can be pulled here, sorted."""
        with self._lock:
            return sorted(self._blobs)

    def get(self, root: str) -> Bytes | None:
        """One blob; None where it is not here."""
        with self._lock:
            return self._blobs.get(root)

    def read(self, request: ChunkRequest) -> memoryview | None:
        """The bytes asked for, not copied; None where the blob is not here. They outlive the blob's place here."""
        held = self.get(request.root)
        return None if held is None else held.data[request.offset : request.offset + request.num_bytes]

    def make_room(self, manifest: Manifest) -> None:
        """Let go of what neither the newest version here nor `manifest`, which is about to be fetched, is made of."""
        with self._lock:
            needed = {blob.root for each in (self._manifest, manifest) if each for blob in blobs(each)}
            self._blobs = {root: held for root, held in self._blobs.items() if root in needed}

    def add(self, root: str, verified: Bytes) -> None:
        """Have others pull this from now on."""
        with self._lock:
            self._blobs[root] = verified

    def complete(self, manifest: Manifest) -> None:
        """All that this version is made of is here. What the one before is made of stays, for pulls that have begun."""
        with self._lock:
            self._manifest = manifest

    def drop(self, root: str) -> None:
        """This is not what it was: the version is not whole any more."""
        with self._lock:
            self._blobs.pop(root, None)
            self._manifest = None
