"""An actor's part in broadcasts: it says that it lives, acknowledges an invitation, receives as a rank of a group.

The group is a process group of its own, beside whatever default group the inference engine has set up.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import redis
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore

from common.chunks import Blob
from common.weights import Invitation
from replay.bulletin import Acknowledgement, BroadcastGroup, Bulletin

log = logging.getLogger(__name__)

TTL_S = 6.0  # an actor silent for this long is not invited
RENEW_S = 2.0
SEAL_TIMEOUT_S = 10.0  # the publisher seals a group well within this, or is gone
POLL_S = 0.01
CHUNK_POLL_S = 0.0005


class BroadcastMissed(RuntimeError):
    """This actor is not in the group, or the group broke; the version can still be pulled."""


class TimedGroup:
    """A process group whose broadcasts end by a deadline; vLLM's engines can take it for a communicator of theirs."""

    def __init__(self, group: ProcessGroup, deadline: float) -> None:
        """`deadline` is of the monotonic clock."""
        self._group = group
        self._deadline = deadline

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Receive `tensor` from rank `src`. Raises RuntimeError past the deadline, or where the group broke."""
        left = timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))
        options = BroadcastOptions()
        options.rootRank, options.timeout = src, left
        work = self._group.broadcast([tensor], options)
        # On a GPU `wait` is of the stream alone, and has no end when a peer has died.
        while tensor.is_cuda and not work.is_completed():
            if time.monotonic() > self._deadline:
                raise RuntimeError(f"a chunk of {tensor.nbytes} bytes did not come by the group's deadline")
            time.sleep(CHUNK_POLL_S)
        work.wait(left)


ReceiveChunks = Callable[[TimedGroup, torch.Tensor, int], None]
"""Fills a flat buffer with what rank 0 sends, so many bytes at a time."""


def receive_chunks(group: TimedGroup, buffer: torch.Tensor, chunk_bytes: int) -> None:
    """Over gloo, whose bytes land in place."""
    for chunk in torch.split(buffer, chunk_bytes):
        group.broadcast(chunk, src=0)


class BroadcastMember:
    """One actor's membership. Owns a thread that renews it, and the group while one is held."""

    def __init__(self, bulletin: Bulletin, actor: str, over_nccl: ReceiveChunks | None = None) -> None:
        """`over_nccl` is how chunks come to a GPU; without it this member is asked to groups over gloo alone."""
        self._bulletin = bulletin
        self._actor = actor
        self._over_nccl = over_nccl
        self._group: ProcessGroup | None = None
        self._held: BroadcastGroup | None = None
        self._last_invitation = 0
        self._closing = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="renew-broadcast", daemon=True)
        self._renewing.start()

    def receive(self, invitation: Invitation, *, root: str, place: Callable[[Blob], torch.Tensor]) -> Blob:
        """Receive the broadcast of `invitation` and return what it was. Raises BroadcastMissed.

        `root` is of the weights that are here, for a delta on them. `place` says where the blob's bytes go, flat and
        uint8; it may raise BroadcastMissed. An invitation is good for one attempt: where that failed, another would
        wait for ranks that have gone on.
        """
        if invitation.number == self._last_invitation:
            raise BroadcastMissed(f"invitation {invitation.number} was tried before")
        self._last_invitation = invitation.number
        held_group = self._held.number if self._held else 0
        device = "cpu" if self._over_nccl is None else "cuda"
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
        except RuntimeError as error:  # torch.distributed's errors have no closer class in common
            self._leave()
            raise BroadcastMissed(f"group {sealed.number} broke: {error}") from error
        return sealed.blob

    def leave(self) -> None:
        """From now on no further invitation comes; a broadcast under way goes on. Idempotent, and does not wait."""
        self._closing.set()

    def close(self) -> None:
        """Leave, and let go of the group. Idempotent."""
        self.leave()
        self._renewing.join()
        self._leave()

    def _sealed(self, invitation: Invitation) -> BroadcastGroup:
        deadline = time.monotonic() + SEAL_TIMEOUT_S
        while (sealed := self._bulletin.sealed_group(invitation.number)) is None:
            if time.monotonic() > deadline:
                raise BroadcastMissed(f"invitation {invitation.number} was not sealed in {SEAL_TIMEOUT_S} s")
            time.sleep(POLL_S)
        return sealed

    def _join(self, sealed: BroadcastGroup) -> None:
        if self._held and self._held.number == sealed.number:
            return
        self._leave()
        timeout = timedelta(seconds=sealed.deadline_s)
        store = TCPStore(sealed.store_host, sealed.store_port, None, False, timeout)
        self._group = _process_group(sealed, PrefixStore(f"group{sealed.number}", store), self._actor, timeout)
        self._held = sealed

    def _receive_chunks(self, sealed: BroadcastGroup, buffer: torch.Tensor, deadline: float) -> None:
        assert self._group is not None
        receive = self._over_nccl if sealed.backend == "nccl" else receive_chunks
        assert receive is not None, "a group over NCCL is sealed only for those who said that they can"
        receive(TimedGroup(self._group, deadline), buffer, sealed.chunk_bytes)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._held = None

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
            log.warning("%s leaves the broadcast by its time to live: %s", self._actor, error)


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
    # By address: gloo's default is what this machine's host name resolves to, often one that others cannot reach.
    gloo._devices = [ProcessGroupGloo.create_device(hostname=_address_towards(sealed.store_host))]
    group._register_backend(
        torch.device("cpu"), ProcessGroup.BackendType.GLOO, ProcessGroupGloo(store, rank, size, gloo)
    )
    return group


def _address_towards(host: str) -> str:
    """This machine's address on the route to `host`. Sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
