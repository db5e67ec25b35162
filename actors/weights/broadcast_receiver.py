"""An actor's part in broadcasts: it registers, acknowledges invitations, and receives as one rank of a group.

The group is a separate process group, independent of the default group of the inference engine.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta

import redis
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroup, ProcessGroupGloo, Store, Work

from slipstream.common.process.connection import address_towards
from slipstream.common.transfer.chunks import Blob
from slipstream.common.transfer.weights import Invitation
from slipstream.replay.fleet.bulletin import CPU, Acknowledgement, BroadcastGroup, Bulletin
from slipstream.replay.fleet.rendezvous import Rendezvous

log = logging.getLogger(__name__)

TTL_S = 6.0  # an actor that has not renewed for this long is not invited
RENEW_S = 2.0
SEAL_TIMEOUT_S = 10.0  # a publisher that is alive seals a group much faster
POLL_S = 0.01
CHUNK_POLL_S = 0.0005
IN_FLIGHT = 2  # chunks


class BroadcastMissed(RuntimeError):
    """This actor is not in the group, or the group failed; the version can still be pulled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a receiver wants the bytes of a blob."""

    buffer: torch.Tensor  # flat, uint8, in host memory
    arrived: Callable[[int], None]  # called with the number of the first bytes that are in the buffer


class Receiving:
    """One broadcast at a member, with IN_FLIGHT chunks at a time: one arrives while the one before is copied, hashed.

    Over gloo chunks arrive in their place in the buffer, over NCCL on `device`, from where they are copied.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, *, deadline: float, stall_s: float) -> None:
        """`deadline` is of the monotonic clock; one chunk may take `stall_s`."""
        self._group = group
        self._device = device
        self._deadline = deadline
        self._stall_s = stall_s

    def receive(self, place: Place, chunk_bytes: int, *, lands_on_device: bool) -> None:
        """Receive into `place`. Raises RuntimeError if the group fails or is too slow."""
        under_way = deque[tuple[Work, torch.Tensor, torch.Tensor]]()
        end = 0
        # A stream of this thread's own: on the default one each copy would wait for what the engine computes.
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream) if stream else nullcontext():
            pieces = deque(torch.split(place.buffer, chunk_bytes))
            while pieces or under_way:
                while pieces and len(under_way) < IN_FLIGHT:
                    piece = pieces.popleft()
                    chunk = (
                        torch.empty(piece.shape, dtype=torch.uint8, device=self._device) if lands_on_device else piece
                    )
                    under_way.append((self._begin(chunk), chunk, piece))
                work, chunk, piece = under_way.popleft()
                self._await(work, chunk)
                if chunk is not piece:
                    piece.copy_(chunk)
                end += piece.nbytes
                place.arrived(end)

    def _begin(self, chunk: torch.Tensor) -> Work:
        options = BroadcastOptions()
        options.timeout = timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))
        return self._group.broadcast([chunk], options)

    def _await(self, work: Work, chunk: torch.Tensor) -> None:
        deadline = min(self._deadline, time.monotonic() + self._stall_s)
        # On a GPU `wait` waits for the stream only, and never returns if a peer has died.
        while chunk.is_cuda and not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a chunk of {chunk.nbytes} bytes did not arrive by the group's deadline")
            time.sleep(CHUNK_POLL_S)
        work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))


class GroupStore(Rendezvous, Store):  # type: ignore[misc]
    """A rendezvous that torch's process groups accept as their store."""


class BroadcastMember:
    """One actor's membership in broadcasts. It owns the thread that renews it, and the current group."""

    def __init__(
        self, client: redis.Redis, run_id: str, actor: str, *, secret: bytes, gpu: torch.device | None = None
    ) -> None:
        """Without `gpu` this member joins groups over gloo only.

        `secret` is the run's key, shared by all members; empty if the run has no key.
        """
        self._client = client
        self._bulletin = Bulletin(client, run_id)
        self._secret = secret
        self._actor = actor
        self._gpu = gpu
        self._group: ProcessGroup | None = None
        self._current: BroadcastGroup | None = None
        self._last_invitation = 0
        self._closing = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="renew-broadcast", daemon=True)
        self._renewing.start()

    def receive(self, invitation: Invitation, *, root: str, place: Callable[[Blob], Place]) -> Blob:
        """Receive the broadcast of `invitation` and return its blob. Raises BroadcastMissed.

        `root` is the root hash of the current weights, to which a delta would apply. `place` returns where to
        put the blob's bytes; it may raise BroadcastMissed. Each invitation can be used once: a second attempt
        would wait for ranks that have already left.
        """
        if invitation.number == self._last_invitation:
            raise BroadcastMissed(f"invitation {invitation.number} was used before")
        self._last_invitation = invitation.number
        held_group = self._current.number if self._current else 0
        device = CPU if self._gpu is None else str(torch.cuda.get_device_properties(self._gpu).uuid)
        acknowledgement = Acknowledgement(held_group=held_group, device=device, root=root)
        self._bulletin.acknowledge(invitation.number, self._actor, acknowledgement)
        sealed = self._sealed(invitation)
        if self._actor not in sealed.actors:
            self._leave()
            raise BroadcastMissed(f"invitation {invitation.number} was sealed without {self._actor}")
        deadline = time.monotonic() + sealed.deadline_s
        try:
            self._join(sealed)
            self._receive_chunks(sealed, place(sealed.blob), deadline)
        # torch.distributed's errors have no closer class in common; OSError: there is no route to the publisher.
        except (RuntimeError, OSError) as error:
            self._leave()
            raise BroadcastMissed(f"group {sealed.number} failed: {error}") from error
        return sealed.blob

    def leave(self) -> None:
        """Stop renewing, so that no more invitations come. Idempotent; does not wait for a broadcast in progress."""
        self._closing.set()

    def close(self) -> None:
        """Leave, and end the current group. Idempotent."""
        self.leave()
        self._renewing.join()
        self._leave()

    def _sealed(self, invitation: Invitation) -> BroadcastGroup:
        deadline = time.monotonic() + SEAL_TIMEOUT_S
        while (sealed := self._bulletin.sealed_group(invitation.number)) is None:
            if time.monotonic() > deadline:
                raise BroadcastMissed(f"invitation {invitation.number} was not sealed in {SEAL_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
        return sealed

    def _join(self, sealed: BroadcastGroup) -> None:
        if self._current and self._current.number == sealed.number:
            return
        self._leave()
        store = GroupStore(
            self._client, self._bulletin.rendezvous_key(sealed.number), secret=self._secret, timeout_s=sealed.deadline_s
        )
        self._group = _process_group(sealed, store, self._actor, timedelta(seconds=sealed.deadline_s))
        self._current = sealed

    def _receive_chunks(self, sealed: BroadcastGroup, place: Place, deadline: float) -> None:
        assert self._group is not None
        device, over_nccl = torch.device("cpu"), sealed.backend == "nccl"
        if over_nccl:
            assert self._gpu, "a group over NCCL is sealed only for actors that acknowledged with a GPU"
            device = self._gpu
        receiving = Receiving(self._group, device, deadline=deadline, stall_s=sealed.stall_s)
        receiving.receive(place, sealed.chunk_bytes, lands_on_device=over_nccl)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._current = None

    def _renew(self) -> None:
        while not self._closing.is_set():
            try:
                self._bulletin.join_broadcast(self._actor, ttl_s=TTL_S)
            except redis.RedisError as error:
                log.warning("%s could not renew its broadcast membership: %s", self._actor, error)
            self._closing.wait(RENEW_S)
        try:
            self._bulletin.leave_broadcast(self._actor)
        except redis.RedisError as error:
            log.warning(
                "%s could not leave the broadcasts; its membership expires in %.0f s: %s", self._actor, TTL_S, error
            )


def _process_group(sealed: BroadcastGroup, store: Store, actor: str, timeout: timedelta) -> ProcessGroup:
    rank, size = sealed.actors.index(actor) + 1, len(sealed.actors) + 1
    group = ProcessGroup(store, rank, size)
    if sealed.backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        group._register_backend(
            torch.device("cuda"), ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL(store, rank, size, nccl)
        )
        return group
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    # gloo's default is the address of this machine's host name, to which other hosts often cannot connect.
    gloo._devices = [ProcessGroupGloo.create_device(hostname=address_towards(sealed.host))]
    group._register_backend(
        torch.device("cpu"), ProcessGroup.BackendType.GLOO, ProcessGroupGloo(store, rank, size, gloo)
    )
    return group
