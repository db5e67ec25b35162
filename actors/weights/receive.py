"""Receives weights for an actor into a separate buffer, and verifies them; the engine commits them later.

The old weights serve meanwhile, and also if this fails: nothing here changes the engine.
"""

import logging
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass

import redis
import torch

from slipstream.actors.weights.broadcast_receiver import BroadcastMember, BroadcastMissed, Place
from slipstream.actors.weights.pull import Puller, PullFailed, actors_puller
from slipstream.actors.weights.refused import WeightsRefused
from slipstream.actors.weights.weights_memory import WeightsMemory
from slipstream.common.process.connection import connect
from slipstream.common.transfer.chunks import CHUNK_BYTES, Blob
from slipstream.common.transfer.delta import apply_delta
from slipstream.common.transfer.encryption import key_from_environment
from slipstream.common.transfer.weights import (
    Hashing,
    Invitation,
    Manifest,
    Offer,
    WeightsError,
    anchor_blob,
    check_blob,
    deltas_from,
    verify,
)

log = logging.getLogger(__name__)

REDIS_PATIENCE_S = 5.0  # if Redis is away for longer, there is no broadcast, and weights are pulled


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverInfo:
    """The settings with which an actor receives weights."""

    redis_url: str
    run_id: str
    actor: str
    transport: str  # `actors.transport`; to an actor, relay is pull
    chunk_bytes: int = CHUNK_BYTES
    timeout_s: float  # for pulling one version; a broadcast, which comes before, has its group's own deadline


class Receiver:
    """Receives one version at a time. Its calls block, so they run in a background thread of the actor.

    It keeps the weights that it received last, and applies deltas to them in place.
    """

    def __init__(self, info: ReceiverInfo, gpu: torch.device | None = None, *, shared: bool = False) -> None:
        """`gpu` is None if the actor has none. With `shared`, other processes can map `memory`."""
        self._info = info
        self._puller: Puller | None = None
        self.memory = WeightsMemory(shared=shared, device=gpu)
        self._root = ""  # root hash of the weights in `memory`; empty if unknown
        self._member: BroadcastMember | None = None
        if info.transport == "broadcast":
            client, key = connect(info.redis_url, patience_s=REDIS_PATIENCE_S), key_from_environment()
            secret = key.secret if key else b""
            self._member = BroadcastMember(client, info.run_id, info.actor, secret=secret, gpu=gpu)

    def receive(self, offer: Offer) -> torch.Tensor:
        """Return the offered weights, verified, as one flat uint8 tensor on the CPU of `manifest.num_bytes`.

        The next call overwrites the tensor. Raises WeightsRefused if no source serves the version, it does not arrive
        in time, or it does not match its hashes.
        """
        if not self._receive_broadcast(offer):
            try:
                self._pull(offer)
            except PullFailed as error:
                raise WeightsRefused(f"version {offer.manifest.policy_version}: {error}") from error
            except WeightsError as error:
                raise WeightsRefused(str(error)) from error
        return self.memory.flat

    def leave_broadcasts(self) -> None:
        """Take part in no more broadcasts; weights can still be pulled. Does not wait."""
        if self._member is not None:
            self._member.leave()

    def close(self) -> None:
        """Leave the broadcasts and close the sockets. Idempotent."""
        if self._member is not None:
            self._member.close()
        if self._puller is not None:
            self._puller.close()

    def _receive_broadcast(self, offer: Offer) -> bool:
        """Receive by broadcast; return whether it succeeded. If not, the weights can still be pulled."""
        if self._member is None or offer.invitation is None or self._info.actor not in offer.invitation.actors:
            return False
        try:
            self._take_broadcast(self._member, offer.invitation, offer.manifest)
        except (BroadcastMissed, WeightsError, redis.RedisError) as error:
            log.warning(
                "%s did not get version %d by broadcast, and pulls it: %s",
                self._info.actor,
                offer.manifest.policy_version,
                error,
            )
            if not self._root:
                self._forget()  # a late chunk of the failed group may still be written into this memory
            return False
        return True

    def _take_broadcast(self, member: BroadcastMember, invitation: Invitation, manifest: Manifest) -> None:
        delta = torch.empty(0, dtype=torch.uint8)
        hashing: Hashing | None = None

        def place(blob: Blob) -> Place:
            nonlocal delta, hashing
            if blob == Blob(root=manifest.root, num_bytes=manifest.num_bytes):
                self._forget(num_bytes=manifest.num_bytes)
                hashing = ending.enter_context(closing(Hashing(manifest.tensors, self.memory.flat.numpy().data)))
                return Place(buffer=self.memory.flat, arrived=hashing.arrived)
            if not manifest.deltas or blob != manifest.deltas[-1].blob or manifest.deltas[-1].base != self._root:
                raise BroadcastMissed(
                    f"blob {blob.root} is neither a full snapshot of the version nor a delta on this actor's weights"
                )
            delta = torch.empty(blob.num_bytes, dtype=torch.uint8)
            return Place(buffer=delta, arrived=lambda num_bytes: None)

        with ExitStack() as ending:
            blob = member.receive(invitation, root=self._root, place=place)
            if delta.numel():
                check_blob(manifest, blob, delta.numpy().data)
                self._apply(delta.numpy().data)
            self._verify(manifest, hashing)

    def _pull(self, offer: Offer) -> None:
        """Pull the deltas on the current weights, or the anchor and its deltas, whichever is smaller."""
        manifest, deadline = offer.manifest, time.monotonic() + self._info.timeout_s
        deltas = deltas_from(manifest, self._root)
        if deltas is None or sum(delta.blob.num_bytes for delta in deltas) > manifest.num_bytes:
            anchor = anchor_blob(manifest)
            self._forget()
            self.memory.adopt(self._fetch(offer, anchor, deadline))
            self._root = anchor.root
            deltas = deltas_from(manifest, anchor.root)
            if deltas is None:
                raise WeightsError(f"version {manifest.policy_version}: its manifest has no deltas on its own anchor")
        for delta in deltas:
            self._root = delta.base  # if the next pull fails, another attempt continues from here
            self._apply(self._fetch(offer, delta.blob, deadline).numpy().data)
        self._verify(manifest)

    def _fetch(self, offer: Offer, blob: Blob, deadline: float) -> torch.Tensor:
        """Pull `blob`, and verify it."""
        if self._puller is None:  # made late: an engine without a run, as in `slipstream eval`, never needs it
            self._puller = actors_puller(
                self._info.redis_url, self._info.run_id, actor=self._info.actor, chunk_bytes=self._info.chunk_bytes
            )
        fetched = self._puller.pull(
            blob,
            publisher=offer.pull_endpoint,
            check=lambda data: check_blob(offer.manifest, blob, data),
            timeout_s=deadline - time.monotonic(),
        )
        return torch.from_numpy(fetched)

    def _forget(self, *, num_bytes: int = 0) -> None:
        """Forget the current weights, and have room for a full snapshot of `num_bytes`."""
        self._root = ""
        self.memory.resize(num_bytes)

    def _apply(self, delta: memoryview) -> None:
        self._root = ""
        apply_delta(delta, self.memory.flat.numpy().data)

    def _verify(self, manifest: Manifest, hashing: Hashing | None = None) -> None:
        self._root = ""
        verify(manifest, self.memory.flat.numpy().data, hashing)
        self._root = manifest.root
