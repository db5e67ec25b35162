"""Keeps track of which slot of the shared memory contains which version, and which slots are free."""

import threading
from dataclasses import dataclass

from slipstream.common.transfer.chunks import ChunkRequest
from slipstream.common.transfer.weights import Manifest
from slipstream.learner.publisher.messages import Freed, Submitted


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredVersion:
    """A version and the slot that contains it."""

    slot: int
    manifest: Manifest


class Shelf:
    """Maps slots to versions, and keeps the deltas between versions. Thread-safe.

    A slot is in one of six states: free (for the learner), pending (submitted, not begun), processing (being hashed),
    newest (the base of the next delta), anchor (for new actors; may also be the newest), previous (the anchor before
    that, for pulls that have begun).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: Submitted | None = None
        self.newest: StoredVersion | None = None  # served last; its slot does not change until the next `serve`
        self._anchor: StoredVersion | None = None
        self._previous: StoredVersion | None = None
        self._deltas: dict[str, bytes] = {}  # of the newest manifest, by root
        self._stopping = False

    def submit(self, submitted: Submitted) -> list[Freed]:
        """Make this version the pending one; an older pending version is skipped."""
        with self._changed:
            freed = self._free_pending()
            self._pending = submitted
            self._changed.notify()
        return freed

    def withdraw(self) -> list[Freed]:
        """Free the slot that is needed least: that of the pending version, or else that of the previous anchor."""
        with self._changed:
            return self._free_pending() or self._free_previous()

    def stop(self) -> None:
        """Make `take` return at once when no version is pending."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    @property
    def is_over(self) -> bool:
        """Whether there will be no more versions."""
        return self._stopping and self._pending is None

    def take(self, wait_s: float) -> Submitted | None:
        """Begin to process the pending version, or the first that comes within `wait_s`; None if none comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending is not None or self._stopping, wait_s)
            submitted, self._pending = self._pending, None
            return submitted

    def serve(self, manifest: Manifest, delta: bytes | None, *, slot: int) -> list[Freed]:
        """Serve the version taken from `slot`, as `manifest`. `delta` is its last delta, None if it has none."""
        with self._changed:
            newest = StoredVersion(slot=slot, manifest=manifest)
            freed = [Freed(slot=self.newest.slot)] if self.newest and self.newest is not self._anchor else []
            if manifest.anchor is None:
                freed += self._free_previous()
                self._previous, self._anchor = self._anchor, newest
            self.newest = newest
            known = self._deltas if delta is None else self._deltas | {manifest.deltas[-1].blob.root: delta}
            self._deltas = {each.blob.root: known[each.blob.root] for each in manifest.deltas}
            return freed

    def overtaken(self) -> bool:
        """Whether to stop retrying the current version: a newer one is pending, or the learner asked to stop."""
        with self._changed:
            return self._pending is not None or self._stopping

    def read(self, request: ChunkRequest, slots: list[memoryview]) -> bytes | None:
        """A copy of the requested bytes; None if this blob is not served. The slot cannot be freed meanwhile."""
        end = request.offset + request.num_bytes
        with self._changed:
            if (delta := self._deltas.get(request.root)) is not None:
                return delta[request.offset : end]
            for stored in (self._anchor, self._previous):
                if stored and stored.manifest.root == request.root:
                    return bytes(slots[stored.slot][request.offset : end])
        return None

    def _free_pending(self) -> list[Freed]:
        overtaken, self._pending = self._pending, None
        return [Freed(slot=overtaken.slot)] if overtaken else []

    def _free_previous(self) -> list[Freed]:
        previous, self._previous = self._previous, None
        return [Freed(slot=previous.slot)] if previous else []
