"""How weights come to an actor: chunk by chunk into a buffer of their own, then verified; the engine commits them.

Old weights keep serving for as long as this takes and whenever it fails: nothing here touches the engine.
"""

import logging
from dataclasses import dataclass

import redis
import torch
import zmq

from actors.broadcast import BroadcastMember, BroadcastMissed
from actors.engine import WeightsRefused
from actors.pull import PullFailed, pull
from common.chunks import Blob
from common.connection import connect
from common.weights import Offer, WeightsError, verify
from replay.bulletin import Bulletin

log = logging.getLogger(__name__)

REDIS_PATIENCE_S = 5.0  # without Redis there is no broadcast, and weights are pulled


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverInfo:
    """What an actor must know to receive weights."""

    redis_url: str
    run_id: str
    actor: str
    transport: str  # broadcast or pull
    chunk_bytes: int
    timeout_s: float  # for pulling one version; a broadcast has its group's own deadline, and comes before


class Receiver:
    """Receives one version at a time. Its calls block: they belong on a background thread of the actor."""

    def __init__(self, info: ReceiverInfo) -> None:
        self._info = info
        self._context = zmq.Context()
        self._member: BroadcastMember | None = None
        if info.transport == "broadcast":
            bulletin = Bulletin(connect(info.redis_url, patience_s=REDIS_PATIENCE_S), info.run_id)
            self._member = BroadcastMember(bulletin, info.actor)

    def receive(self, offer: Offer) -> torch.Tensor:
        """Return the offered weights, verified, as one flat uint8 tensor on the CPU of `manifest.num_bytes`.

        Raises WeightsRefused: the version is no longer served, did not come in time, or is not what its hashes say.
        """
        buffer = torch.empty(offer.manifest.num_bytes, dtype=torch.uint8)
        if not self._receive_broadcast(offer, buffer):
            try:
                pull(
                    self._context,
                    offer.pull_endpoint,
                    Blob(root=offer.manifest.root, num_bytes=offer.manifest.num_bytes),
                    buffer.numpy().data,
                    chunk_bytes=self._info.chunk_bytes,
                    timeout_s=self._info.timeout_s,
                )
                verify(offer.manifest, buffer.numpy().data)
            except PullFailed as error:
                raise WeightsRefused(f"version {offer.manifest.policy_version}: {error}") from error
            except WeightsError as error:
                raise WeightsRefused(str(error)) from error
        return buffer

    def leave_broadcasts(self) -> None:
        """Take part in no further broadcast; weights can still be pulled. Does not wait."""
        if self._member is not None:
            self._member.leave()

    def close(self) -> None:
        """Leave the broadcasts and let go of the sockets. Idempotent."""
        if self._member is not None:
            self._member.close()
        self._context.destroy(linger=0)

    def _receive_broadcast(self, offer: Offer, buffer: torch.Tensor) -> bool:
        """True when `buffer` now holds the verified weights; whatever else happened, they can still be pulled."""
        if self._member is None or offer.invitation is None or self._info.actor not in offer.invitation.actors:
            return False
        try:
            self._member.receive(offer.invitation, buffer)
            verify(offer.manifest, buffer.numpy().data)
        except (BroadcastMissed, WeightsError, redis.RedisError) as error:
            log.warning("%s pulls version %d: %s", self._info.actor, offer.manifest.policy_version, error)
            return False
        return True
