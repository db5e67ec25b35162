"""How weights come to an actor: chunk by chunk into a buffer of their own, then verified; the engine commits them.

Old weights keep serving for as long as this takes and whenever it fails: nothing here touches the engine.
"""

import logging
import socket
import time
from dataclasses import dataclass

import redis
import torch

from actors.broadcast import BroadcastMember, BroadcastMissed, ReceiveChunks
from actors.engine import WeightsRefused
from actors.pull import Puller, PullFailed
from actors.sources import Sources
from common.blob_store import BlobStore, StoreError, run_store
from common.chunks import Blob
from common.connection import connect
from common.curve import key_from_environment
from common.delta import apply_delta
from common.weights import (
    Invitation,
    Manifest,
    Offer,
    WeightsError,
    anchor_blob,
    check_blob,
    deltas_from,
    verify,
)
from replay.bulletin import Bulletin

log = logging.getLogger(__name__)

REDIS_PATIENCE_S = 5.0  # without Redis there is no broadcast, and weights are pulled
RELAYS_PATIENCE_S = 0.0  # without Redis, the relays that were known last are asked, and the publisher, at once
RELAY_PATIENCE_S = 5.0  # a relay that gets no nearer to having the weights for this long is not waited for


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverInfo:
    """What an actor must know to receive weights."""

    redis_url: str
    run_id: str
    actor: str
    transport: str  # broadcast, pull or disk
    chunk_bytes: int
    timeout_s: float  # for pulling one version; a broadcast has its group's own deadline, and comes before
    disk: str  # `weights.disk`, a path or fsspec URL


class Receiver:
    """Receives one version at a time. Its calls block: they belong on a background thread of the actor.

    It keeps the newest weights that it received, and changes them in place by a delta where there is one.
    """

    def __init__(self, info: ReceiverInfo, over_nccl: ReceiveChunks | None = None) -> None:
        """`over_nccl` is how a broadcast's chunks come to a GPU, where the actor has one."""
        self._info = info
        self._puller: Puller | None = None
        self._store = run_store(info.disk, info.run_id) if info.transport == "disk" else None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._root = ""  # of what `_buffer` holds; empty where that is not known
        self._member: BroadcastMember | None = None
        if info.transport == "broadcast":
            bulletin = Bulletin(connect(info.redis_url, patience_s=REDIS_PATIENCE_S), info.run_id)
            self._member = BroadcastMember(bulletin, info.actor, over_nccl)

    def receive(self, offer: Offer) -> torch.Tensor:
        """Return the offered weights, verified, as one flat uint8 tensor on the CPU of `manifest.num_bytes`.

        The tensor is overwritten by the next call. Raises WeightsRefused: the version is no longer served, did not come
        in time, or is not what its hashes say.
        """
        if not self._receive_broadcast(offer):
            try:
                self._pull(offer)
            except (PullFailed, StoreError) as error:
                raise WeightsRefused(f"version {offer.manifest.policy_version}: {error}") from error
            except WeightsError as error:
                raise WeightsRefused(str(error)) from error
        return self._buffer

    def leave_broadcasts(self) -> None:
        """Take part in no further broadcast; weights can still be pulled. Does not wait."""
        if self._member is not None:
            self._member.leave()

    def close(self) -> None:
        """Leave the broadcasts and let go of the sockets. Idempotent."""
        if self._member is not None:
            self._member.close()
        if self._puller is not None:
            self._puller.close()

    def _receive_broadcast(self, offer: Offer) -> bool:
        """True when the verified weights are here; whatever else happened, they can still be pulled."""
        if self._member is None or offer.invitation is None or self._info.actor not in offer.invitation.actors:
            return False
        try:
            self._take_broadcast(self._member, offer.invitation, offer.manifest)
        except (BroadcastMissed, WeightsError, redis.RedisError) as error:
            log.warning("%s pulls version %d: %s", self._info.actor, offer.manifest.policy_version, error)
            return False
        return True

    def _take_broadcast(self, member: BroadcastMember, invitation: Invitation, manifest: Manifest) -> None:
        delta = torch.empty(0, dtype=torch.uint8)

        def place(blob: Blob) -> torch.Tensor:
            nonlocal delta
            if blob == Blob(root=manifest.root, num_bytes=manifest.num_bytes):
                self._forget(num_bytes=manifest.num_bytes)
                return self._buffer
            if not manifest.deltas or blob != manifest.deltas[-1].blob or manifest.deltas[-1].base != self._root:
                raise BroadcastMissed(f"blob {blob.root} is not the whole version, nor a delta on what is here")
            delta = torch.empty(blob.num_bytes, dtype=torch.uint8)
            return delta

        blob = member.receive(invitation, root=self._root, place=place)
        if delta.numel():
            check_blob(manifest, blob, delta.numpy().data)
            self._apply(delta.numpy().data)
        self._verify(manifest)

    def _pull(self, offer: Offer) -> None:
        """By deltas from what is here, or else from the anchor: whichever is less."""
        manifest, deadline = offer.manifest, time.monotonic() + self._info.timeout_s
        deltas = deltas_from(manifest, self._root)
        if deltas is None or sum(delta.blob.num_bytes for delta in deltas) > manifest.num_bytes:
            anchor = anchor_blob(manifest)
            self._forget(num_bytes=0)
            self._buffer = self._fetch(offer, anchor, deadline)
            self._root = anchor.root
            deltas = deltas_from(manifest, anchor.root)
            if deltas is None:
                raise WeightsError(f"version {manifest.policy_version}: no delta leads on from its anchor")
        for delta in deltas:
            self._root = delta.base  # where this one does not come, another attempt goes on from here
            self._apply(self._fetch(offer, delta.blob, deadline).numpy().data)
        self._verify(manifest)

    def _fetch(self, offer: Offer, blob: Blob, deadline: float) -> torch.Tensor:
        """The bytes of `blob`, checked."""
        if self._store is not None:
            return self._read(self._store, offer, blob)
        if self._puller is None:  # an engine that serves one folder, as in `slipstream eval`, is offered nothing
            self._puller = _puller(self._info)
        fetched = self._puller.pull(
            blob,
            publisher=offer.pull_endpoint,
            check=lambda data: check_blob(offer.manifest, blob, data),
            timeout_s=deadline - time.monotonic(),
        )
        return torch.from_numpy(fetched)

    def _read(self, store: BlobStore, offer: Offer, blob: Blob) -> torch.Tensor:
        buffer = torch.empty(blob.num_bytes, dtype=torch.uint8)
        store.read(blob, buffer.numpy().data)
        check_blob(offer.manifest, blob, buffer.numpy().data)
        return buffer

    def _forget(self, *, num_bytes: int) -> None:
        """What is here is about to be overwritten by `num_bytes` of whole weights."""
        self._root = ""
        if self._buffer.numel() != num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)

    def _apply(self, delta: memoryview) -> None:
        self._root = ""
        apply_delta(delta, self._buffer.numpy().data)

    def _verify(self, manifest: Manifest) -> None:
        self._root = ""
        verify(manifest, self._buffer.numpy().data)
        self._root = manifest.root


def _puller(info: ReceiverInfo) -> Puller:
    bulletin = Bulletin(connect(info.redis_url, patience_s=RELAYS_PATIENCE_S), info.run_id)
    return Puller(
        Sources(bulletin.relays, name=info.actor, host=socket.gethostname(), patience_s=RELAY_PATIENCE_S),
        blame=bulletin.blame,
        chunk_bytes=info.chunk_bytes,
        key=key_from_environment(),
    )
