"""The blobs that a relay has, by root hash: the model's files, and those of the newest version and the one before."""

from collections.abc import Sequence

from slipstream.actors.weights.fetch import Bytes
from slipstream.common.transfer.chunks import Blob, ChunkRequest
from slipstream.common.transfer.weights import Manifest, blobs


class Holdings:
    """The blobs of the model's files and of at most two versions, which share most of them.

    One thread changes them while others read: no dictionary changes, another takes its place.
    """

    def __init__(self) -> None:
        self._blobs: dict[str, Bytes] = {}
        self.manifest: Manifest | None = None  # of the newest complete version; the one before stays, for pulls

    def roots(self) -> list[str]:
        """The roots of all blobs, sorted."""
        return sorted(self._blobs)

    def get(self, root: str) -> Bytes | None:
        """One blob; None if the relay does not have it."""
        return self._blobs.get(root)

    def read(self, request: ChunkRequest) -> memoryview | None:
        """The requested bytes without a copy, valid after the blob is removed too; None if the blob is missing."""
        held = self.get(request.root)
        return None if held is None else held.data[request.offset : request.offset + request.num_bytes]

    def make_room(self, manifest: Manifest, files: Sequence[Blob]) -> None:
        """Remove the blobs that are not `files`, and that neither the newest complete version nor `manifest` needs."""
        versions = [blob for each in (self.manifest, manifest) if each for blob in blobs(each)]
        needed = {blob.root for blob in [*files, *versions]}
        self._blobs = {root: held for root, held in self._blobs.items() if root in needed}

    def add(self, root: str, verified: Bytes) -> None:
        """Add a verified blob, which others can pull from now on."""
        self._blobs = self._blobs | {root: verified}

    def drop(self, root: str) -> None:
        """Remove a corrupt blob; then no version is complete."""
        self._blobs = {other: held for other, held in self._blobs.items() if other != root}
        self.manifest = None
