"""Which slot of the shared memory holds which version, and what may become of it."""

import threading
from dataclasses import dataclass

from common.chunks import ChunkRequest
from common.weights import Manifest
from learner.publisher.messages import Freed, Submitted


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A version and where its bytes are."""

    slot: int
    manifest: Manifest


def num_slots(*, anchor_every: int) -> int:
    """The anchor, the newest (which may be it for good), one that is being hashed, one for the learner to write."""
    return 3 if anchor_every == 1 else 4


class Shelf:
    """Which slot holds which version, for all threads, and the deltas between them.

    A slot is in one of six states: free (the learner's), pending (submitted, not begun), in hand (being hashed),
    newest (what the next delta is made on), anchor (for newcomers; the newest may be it), previous (the anchor before
    it, for pulls that have begun).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: Submitted | None = None
        self._in_hand: Submitted | None = None
        self._newest: Held | None = None
        self._anchor: Held | None = None
        self._previous: Held | None = None
        self._deltas: dict[str, bytes] = {}  # of the newest manifest, by root
        self._stopping = False

    @property
    def newest(self) -> Held | None:
        """What was served last. Its slot stays as it is until the next `serve`."""
        return self._newest

    def submit(self, submitted: Submitted) -> list[Freed]:
        """Make this version the pending one; an older one that was not begun is overtaken."""
        with self._changed:
            freed = self._free_pending()
            self._pending = submitted
            self._changed.notify()
        return freed

    def withdraw(self) -> list[Freed]:
        """Free a slot that nothing needs as much as a newer version does: the pending one, else the previous one."""
        with self._changed:
            return self._free_pending() or self._free_previous()

    def stop(self) -> None:
        """Let `take` return None once nothing is pending."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def take(self) -> Submitted | None:
        """Wait for a version and take it in hand; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending is not None or self._stopping)
            self._in_hand, self._pending = self._pending, None
            return self._in_hand

    def serve(self, manifest: Manifest, delta: bytes | None) -> list[Freed]:
        """The version in hand is `manifest`: serve it. `delta` is its last one, None where there are none."""
        with self._changed:
            assert self._in_hand is not None
            newest = Held(slot=self._in_hand.slot, manifest=manifest)
            self._in_hand = None
            freed = self._free_newest()
            if manifest.anchor is None:
                freed += self._free_previous()
                self._previous, self._anchor = self._anchor, newest
            self._newest = newest
            known = self._deltas if delta is None else self._deltas | {manifest.deltas[-1].blob.root: delta}
            self._deltas = {each.blob.root: known[each.blob.root] for each in manifest.deltas}
            return freed

    def overtaken(self) -> bool:
        """A newer version is pending, or none will come: what is in hand need not be tried for ever."""
        with self._changed:
            return self._pending is not None or self._stopping

    def read(self, request: ChunkRequest, slots: list[memoryview]) -> bytes | None:
        """A copy of the bytes asked for; None when no such blob is served. The slot cannot be freed meanwhile."""
        end = request.offset + request.num_bytes
        with self._changed:
            if (delta := self._deltas.get(request.root)) is not None:
                return delta[request.offset : end]
            for held in (self._anchor, self._previous):
                if held and held.manifest.root == request.root:
                    return bytes(slots[held.slot][request.offset : end])
        return None

    def _free_pending(self) -> list[Freed]:
        overtaken, self._pending = self._pending, None
        return [Freed(slot=overtaken.slot, skipped=True)] if overtaken else []

    def _free_newest(self) -> list[Freed]:
        newest, self._newest = self._newest, None
        return [Freed(slot=newest.slot, skipped=False)] if newest and newest is not self._anchor else []

    def _free_previous(self) -> list[Freed]:
        previous, self._previous = self._previous, None
        return [Freed(slot=previous.slot, skipped=False)] if previous else []
