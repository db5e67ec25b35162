"""The publisher's part in broadcasts: invite, gather acknowledgements, seal, send.

Membership is settled anew for every version, so a member that died or stopped costs one deadline at most and is not
waited for again. A group is used again while its members stay the same and all of them still hold it.
"""

import logging
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore

from common.chunks import Blob
from common.weights import Invitation, Manifest
from replay.bulletin import Acknowledgement, BroadcastGroup, Bulletin

log = logging.getLogger(__name__)

PREPARE_S = 3.0  # for an invited actor to see the offer and acknowledge it
POLL_S = 0.01
CHUNK_POLL_S = 0.0005
SLACK = 3.0  # a send may take this many times as long, by the byte, as the last one of the same group
MIN_DEADLINE_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastReport:
    """A broadcast that was whole."""

    seconds: float  # the sending alone: without the wait for acknowledgements, without joining
    num_receivers: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """One version, both ways."""

    whole: torch.Tensor  # flat, uint8
    delta: bytes | None  # on the version before it; None where there is none


class Broadcaster:
    """Rank 0 of the broadcast groups. Owns their store, and the group that was used last."""

    def __init__(
        self, bulletin: Bulletin, *, host: str, chunk_bytes: int, timeout_s: float, device: torch.device
    ) -> None:
        self._bulletin = bulletin
        self._host = host
        self._chunk_bytes = chunk_bytes
        self._timeout_s = timeout_s
        self._device = device
        self._store = TCPStore(host, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
        self._group: ProcessGroup | None = None
        self._held: BroadcastGroup | None = None
        self._last_byte_s = 0.0  # of the last send

    def invite(self) -> Invitation | None:
        """Whom to ask to this broadcast; None where nobody wants one."""
        actors = self._bulletin.broadcast_members()
        return Invitation(number=self._bulletin.next_invitation(), actors=actors) if actors else None

    def broadcast(self, invitation: Invitation, manifest: Manifest, payload: Payload) -> BroadcastReport | None:
        """Send the delta to those who acknowledge, the whole weights if one of them lacks its base; say how it went.

        None where nobody acknowledged or the group broke: its members pull, and the next broadcast builds a new one.
        """
        answers = self._gather(invitation)
        if payload.delta is not None and all(answer.root == manifest.deltas[-1].base for answer in answers.values()):
            blob = manifest.deltas[-1].blob
            buffer = torch.frombuffer(bytearray(payload.delta), dtype=torch.uint8)
        else:
            blob = Blob(root=manifest.root, num_bytes=manifest.num_bytes)
            buffer = payload.whole
        sealed = self._seal(invitation, answers, blob)
        if not sealed.actors:
            return None
        start = time.monotonic()
        try:
            self._join(sealed)
            joined = time.monotonic()
            assert self._group is not None
            device = self._device if sealed.backend == "nccl" else torch.device("cpu")
            send_chunks(self._group, buffer, sealed.chunk_bytes, device, start + sealed.deadline_s)
        except RuntimeError as error:  # torch.distributed's errors have no closer class in common
            log.warning("broadcast group %d of %s broke: %s", sealed.number, sealed.actors, error)
            self._leave()
            return None
        seconds = time.monotonic() - joined
        self._last_byte_s = seconds / blob.num_bytes
        return BroadcastReport(seconds=seconds, num_receivers=len(sealed.actors), num_bytes=blob.num_bytes)

    def _gather(self, invitation: Invitation) -> dict[str, Acknowledgement]:
        deadline = time.monotonic() + PREPARE_S
        while len(answers := self._bulletin.acknowledgements(invitation.number)) < len(invitation.actors):
            if time.monotonic() > deadline:
                log.warning(
                    "left out of broadcast %d: %s", invitation.number, sorted({*invitation.actors} - {*answers})
                )
                break
            time.sleep(POLL_S)
        return answers

    def _seal(self, invitation: Invitation, answers: dict[str, Acknowledgement], blob: Blob) -> BroadcastGroup:
        actors = sorted(answers)
        held = self._held
        if held and held.actors == actors and all(answer.held_group == held.number for answer in answers.values()):
            deadline_s = min(self._timeout_s, max(SLACK * self._last_byte_s * blob.num_bytes, MIN_DEADLINE_S))
            number = held.number
        else:
            self._leave()
            deadline_s = self._timeout_s
            number = invitation.number
        on_gpus = self._device.type == "cuda" and all(answer.device == "cuda" for answer in answers.values())
        sealed = BroadcastGroup(
            number=number,
            backend="nccl" if on_gpus else "gloo",
            store_host=self._host,
            store_port=self._store.port,
            actors=actors,
            blob=blob,
            chunk_bytes=self._chunk_bytes,
            deadline_s=deadline_s,
        )
        self._bulletin.seal(invitation.number, sealed)
        return sealed

    def _join(self, sealed: BroadcastGroup) -> None:
        if self._group is not None:
            return
        timeout = timedelta(seconds=sealed.deadline_s)
        store = PrefixStore(f"group{sealed.number}", self._store)
        self._group = _process_group(sealed, store, timeout)
        self._held = sealed

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._held = None


def send_chunks(
    group: ProcessGroup, buffer: torch.Tensor, chunk_bytes: int, device: torch.device, deadline: float
) -> None:
    """Broadcast flat `buffer` as rank 0, so many bytes at a time and by way of `device`.

    Raises RuntimeError past the deadline, of the monotonic clock, or where the group broke.
    """
    for piece in torch.split(buffer, chunk_bytes):
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        options = BroadcastOptions()
        options.timeout = left
        work = group.broadcast([piece.to(device)], options)
        # On a GPU `wait` is of the stream alone, and has no end when a receiver has died.
        while device.type == "cuda" and not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a chunk of {piece.nbytes} bytes was not sent by the group's deadline")
            time.sleep(CHUNK_POLL_S)
        work.wait(left)


def _process_group(sealed: BroadcastGroup, store: Store, timeout: timedelta) -> ProcessGroup:
    size = len(sealed.actors) + 1
    group = ProcessGroup(store, 0, size)
    if sealed.backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        group._register_backend(
            torch.device("cuda"), ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL(store, 0, size, nccl)
        )
        return group
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    # By address: gloo's default is what this machine's host name resolves to, often one that others cannot reach.
    gloo._devices = [ProcessGroupGloo.create_device(hostname=sealed.store_host)]
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, ProcessGroupGloo(store, 0, size, gloo))
    return group
