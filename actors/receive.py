"""How weights come to an actor: chunk by chunk into a buffer of their own, then verified; the engine commits them.

Old weights keep serving for as long as this takes and whenever it fails: nothing here touches the engine.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass

import msgspec
import redis
import torch
import zmq

from actors.broadcast import BroadcastMember, BroadcastMissed
from actors.engine import WeightsRefused
from common.connection import connect
from common.weights import ChunkReply, ChunkRequest, Manifest, Offer, WeightsError, verify
from replay.bulletin import Bulletin

log = logging.getLogger(__name__)

WINDOW = 4  # requests in flight; more only fills the publisher's queue
RETRY_S = 1.0  # chunks that were asked for and did not come in this time are asked for again
SILENCE_S = 10.0  # a publisher answers in milliseconds; one that says nothing for this long is gone
MAX_HEADER_BYTES = 4096
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
            self._pull(offer, buffer)
            try:
                verify(offer.manifest, buffer.numpy().data)
            except WeightsError as error:
                raise WeightsRefused(str(error)) from error
        return buffer

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

    def _pull(self, offer: Offer, buffer: torch.Tensor) -> None:
        deadline = time.monotonic() + self._info.timeout_s
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, self._info.chunk_bytes + MAX_HEADER_BYTES)
            socket.connect(offer.pull_endpoint)
            pull = _Pull(socket, offer.manifest, buffer.numpy().data, self._info.chunk_bytes)
            while not pull.done:
                if time.monotonic() > deadline:
                    raise WeightsRefused(f"version {offer.manifest.policy_version}: {pull} at the deadline")
                pull.turn()


class _Pull:
    """One version on its way over one socket: which chunks wait, which are asked for, which have come."""

    def __init__(self, socket: "zmq.Socket[bytes]", manifest: Manifest, view: memoryview, chunk_bytes: int) -> None:
        self._socket = socket
        self._manifest = manifest
        self._view = view
        self._chunk_bytes = chunk_bytes
        self._waiting = deque(range(0, view.nbytes, chunk_bytes))
        self._asked: set[int] = set()
        self._last_reply = time.monotonic()

    def __str__(self) -> str:
        missing = len(self._waiting) + len(self._asked)
        return f"{missing} of {-(-self._view.nbytes // self._chunk_bytes)} chunks missing"

    @property
    def done(self) -> bool:
        return not self._waiting and not self._asked

    def turn(self) -> None:
        """Fill the window, then take one reply; after RETRY_S without any, forget what was asked for.

        Raises WeightsRefused after SILENCE_S without any: the publisher is gone, and a new one may have made its offer.
        """
        while self._waiting and len(self._asked) < WINDOW:
            self._ask(self._waiting.popleft())
        if self._socket.poll(int(RETRY_S * 1000)):
            self._take([frame.buffer for frame in self._socket.recv_multipart(copy=False)])
            self._last_reply = time.monotonic()
        elif time.monotonic() - self._last_reply > SILENCE_S:
            raise WeightsRefused(f"version {self._manifest.policy_version}: {self}, no answer for {SILENCE_S:.0f} s")
        else:
            self._waiting.extendleft(sorted(self._asked, reverse=True))
            self._asked.clear()

    def _ask(self, offset: int) -> None:
        request = ChunkRequest(root=self._manifest.root, offset=offset, num_bytes=self._num_bytes(offset))
        self._asked.add(offset)
        self._socket.send(msgspec.msgpack.encode(request))

    def _num_bytes(self, offset: int) -> int:
        return min(self._chunk_bytes, self._view.nbytes - offset)

    def _take(self, frames: list[memoryview]) -> None:
        reply = _reply(frames)
        if reply.root != self._manifest.root or reply.offset not in self._asked:
            return  # a chunk that was asked for twice
        if reply.gone:
            raise WeightsRefused(f"version {self._manifest.policy_version} is no longer served; a newer one is")
        if frames[1].nbytes != self._num_bytes(reply.offset):
            raise WeightsRefused(f"chunk at {reply.offset} holds {frames[1].nbytes} bytes, not what was asked for")
        self._view[reply.offset : reply.offset + frames[1].nbytes] = frames[1]
        self._asked.remove(reply.offset)


def _reply(frames: list[memoryview]) -> ChunkReply:
    if len(frames) != 2:
        raise WeightsRefused(f"a reply of {len(frames)} frames, not a header and its bytes")
    try:
        return msgspec.msgpack.decode(frames[0], type=ChunkReply)
    except msgspec.MsgspecError as error:
        raise WeightsRefused(f"not the header of a chunk: {error}") from error
