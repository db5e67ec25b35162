"""An actor's part in broadcasts: it registers, acknowledges invitations, and receives as one rank of a group.

The group is a separate process group, independent of the default group of the inference engine.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import redis
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroup, ProcessGroupGloo, Store

from common.chunks import Blob
from common.weights import Invitation
from replay.bulletin import CPU, Acknowledgement, BroadcastGroup, Bulletin
from replay.rendezvous import Rendezvous

log = logging.getLogger(__name__)

TTL_S = 6.0  # an actor that has not renewed for this long is not invited
RENEW_S = 2.0
SEAL_TIMEOUT_S = 10.0  # a publisher that is alive seals a group much faster
POLL_S = 0.01
CHUNK_POLL_S = 0.0005


class BroadcastMissed(RuntimeError):
    """This actor is not in the group, or the group failed; the version can still be pulled."""


class TimedGroup:
    """A process group whose broadcasts end by a deadline; vLLM's engines can use it as their communicator."""

    def __init__(self, group: ProcessGroup, deadline: float) -> None:
        """`deadline` is of the monotonic clock."""
        self._group = group
        self._deadline = deadline

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Receive `tensor` from rank `src`. Raises RuntimeError after the deadline, or if the group fails."""
        left = timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))
        options = BroadcastOptions()
        options.rootRank, options.timeout = src, left
        work = self._group.broadcast([tensor], options)
        # On a GPU `wait` waits for the stream only, and never returns if a peer has died.
        while tensor.is_cuda and not work.is_completed():
            if time.monotonic() > self._deadline:
                raise RuntimeError(f"a chunk of {tensor.nbytes} bytes did not arrive by the group's deadline")
            time.sleep(CHUNK_POLL_S)
        work.wait(left)


ReceiveChunks = Callable[[TimedGroup, torch.Tensor, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class OverNccl:
    """How an actor with a GPU receives chunks."""

    gpu: str  # its UUID: NCCL refuses two members on one GPU
    receive: ReceiveChunks


"""Receives a flat buffer from rank 0, in chunks of the given number of bytes."""


def receive_chunks(group: TimedGroup, buffer: torch.Tensor, chunk_bytes: int) -> None:
    """Receive chunks over gloo, which writes them in place."""
    for chunk in torch.split(buffer, chunk_bytes):
        group.broadcast(chunk, src=0)


class GroupStore(Rendezvous, Store):  # type: ignore[misc]
    """A rendezvous that torch's process groups accept as their store."""

    def __init__(self, client: redis.Redis, name: str, *, secret: bytes, timeout_s: float) -> None:
        Store.__init__(self)
        Rendezvous.__init__(self, client, name, secret=secret, timeout_s=timeout_s)


class BroadcastMember:
    """One actor's membership in broadcasts. It owns the thread that renews it, and the current group."""

    def __init__(
        self, client: redis.Redis, run_id: str, actor: str, *, secret: bytes, over_nccl: OverNccl | None = None
    ) -> None:
        """Without `over_nccl` this member joins groups over gloo only.

        `secret` is the run's key, shared by all members; empty if the run has no key.
        """
        self._client = client
        self._bulletin = Bulletin(client, run_id)
        self._secret = secret
        self._actor = actor
        self._over_nccl = over_nccl
        self._group: ProcessGroup | None = None
        self._current: BroadcastGroup | None = None
        self._last_invitation = 0
        self._closing = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="renew-broadcast", daemon=True)
        self._renewing.start()

    def receive(self, invitation: Invitation, *, root: str, place: Callable[[Blob], torch.Tensor]) -> Blob:
        """Receive the broadcast of `invitation` and return its blob. Raises BroadcastMissed.

        `root` is the root hash of the current weights, to which a delta would apply. `place` returns the flat uint8
        tensor for the blob's bytes; it may raise BroadcastMissed. Each invitation can be used once: a second attempt
        would wait for ranks that have already left.
        """
        if invitation.number == self._last_invitation:
            raise BroadcastMissed(f"invitation {invitation.number} was used before")
        self._last_invitation = invitation.number
        held_group = self._current.number if self._current else 0
        device = CPU if self._over_nccl is None else self._over_nccl.gpu
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

    def _receive_chunks(self, sealed: BroadcastGroup, buffer: torch.Tensor, deadline: float) -> None:
        assert self._group is not None
        receive: ReceiveChunks = receive_chunks
        if sealed.backend == "nccl":
            assert self._over_nccl, "a group over NCCL is sealed only for actors that acknowledged with a GPU"
            receive = self._over_nccl.receive
        receive(TimedGroup(self._group, deadline), buffer, sealed.chunk_bytes)

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
    gloo._devices = [ProcessGroupGloo.create_device(hostname=_address_towards(sealed.host))]
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
