"""The publisher's side of broadcasts: invite actors, collect acknowledgements, seal the group, send.

The members are chosen again for every version, so a dead or suspended member costs at most one deadline. A process
group is reused while its members stay the same and all of them still have it.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import redis
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroup, ProcessGroupGloo, Store, Work

from slipstream.common.transfer.chunks import Blob
from slipstream.common.transfer.weights import Invitation, Manifest
from slipstream.learner.publisher.messages import Broadcasted, PublisherSettings
from slipstream.replay.fleet.bulletin import CPU, Acknowledgement, BroadcastGroup, Bulletin
from slipstream.replay.fleet.rendezvous import Rendezvous

log = logging.getLogger(__name__)

PREPARE_S = 3.0  # time for an invited actor to see the offer and acknowledge it
POLL_S = 0.01
CHUNK_POLL_S = 0.0005
SLACK = 3.0  # a send may take this many times as long per byte as the last one of the same group
MIN_DEADLINE_S = 2.0
LEAST_BYTES_PER_S = 250e6  # over a slower network large weights are pulled, unless the timeout suffices
CHUNK_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}
MIN_CHUNK_BYTES = 4 << 20
IN_FLIGHT = 2  # chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """The bytes of a version: all weights, and the delta."""

    whole: torch.Tensor  # flat, uint8
    delta: bytes | None  # from the version before; None if the version travels whole


class GroupStore(Rendezvous, Store):  # type: ignore[misc]
    """A rendezvous as the store of a torch process group."""


class Broadcaster:
    """Rank 0 of the broadcast groups. Owns the group of the last broadcast."""

    def __init__(self, client: redis.Redis, settings: PublisherSettings, *, secret: bytes) -> None:
        """`secret` is shared with the actors that may take part; empty if the run has no key."""
        self._client = client
        self._settings = settings
        self._bulletin = Bulletin(client, settings.run_id)
        self._secret = secret
        self._device = torch.device(settings.device)
        self._group: ProcessGroup | None = None
        self._joined: BroadcastGroup | None = None
        self._last_byte_s = 0.0  # of the last send

    def invite(self) -> Invitation | None:
        """The actors to invite to the next broadcast; None if no actor takes broadcasts."""
        actors = self._bulletin.broadcast_members()
        return Invitation(number=self._bulletin.next_invitation(), actors=actors) if actors else None

    def broadcast(self, invitation: Invitation, manifest: Manifest, payload: Payload) -> Broadcasted | None:
        """Send the delta to the actors that acknowledge, or all weights if one of them lacks the delta's base.

        None if no actor acknowledged or the group failed: its members then pull, and the next broadcast builds a new
        group.
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
            sending = Sending(self._group, device, deadline=start + sealed.deadline_s, stall_s=sealed.stall_s)
            sending.send(buffer, sealed.chunk_bytes)
        except RuntimeError as error:  # the closest common class of torch.distributed's errors
            log.warning("broadcast group %d of %s failed: %s", sealed.number, sealed.actors, error)
            self._leave()
            return None
        seconds = time.monotonic() - joined
        self._last_byte_s = seconds / blob.num_bytes
        log.info(
            "version %d, %.1f MB, broadcast to %d actors in %.3f s",
            manifest.policy_version,
            blob.num_bytes / 1e6,
            len(sealed.actors),
            seconds,
        )
        return Broadcasted(broadcast_s=seconds)

    def _gather(self, invitation: Invitation) -> dict[str, Acknowledgement]:
        deadline = time.monotonic() + PREPARE_S
        while len(answers := self._bulletin.acknowledgements(invitation.number)) < len(invitation.actors):
            if time.monotonic() > deadline:
                log.warning(
                    "broadcast %d goes without %s: no acknowledgement within %g s",
                    invitation.number,
                    sorted({*invitation.actors} - {*answers}),
                    PREPARE_S,
                )
                break
            time.sleep(POLL_S)
        return answers

    def _seal(self, invitation: Invitation, answers: dict[str, Acknowledgement], blob: Blob) -> BroadcastGroup:
        actors = sorted(answers)
        joined, timeout_s = self._joined, self._settings.broadcast_timeout_s
        longest_s = max(timeout_s, blob.num_bytes / LEAST_BYTES_PER_S)
        if (
            joined
            and joined.actors == actors
            and all(answer.held_group == joined.number for answer in answers.values())
        ):
            deadline_s = min(longest_s, max(SLACK * self._last_byte_s * blob.num_bytes, MIN_DEADLINE_S))
            number = joined.number
        else:
            self._leave()
            deadline_s = longest_s
            number = invitation.number
        own = str(torch.cuda.get_device_properties(self._device).uuid) if self._device.type == "cuda" else CPU
        backend = backend_of([own, *(answer.device for answer in answers.values())])
        sealed = BroadcastGroup(
            number=number,
            backend=backend,
            host=self._settings.host,
            actors=actors,
            blob=blob,
            chunk_bytes=_chunk_bytes(backend, self._device),
            deadline_s=deadline_s,
            stall_s=min(timeout_s, deadline_s),
        )
        self._bulletin.seal(invitation.number, sealed)
        return sealed

    def _join(self, sealed: BroadcastGroup) -> None:
        if self._group is not None:
            return
        store = GroupStore(
            self._client, self._bulletin.rendezvous_key(sealed.number), secret=self._secret, timeout_s=sealed.deadline_s
        )
        self._group = _process_group(sealed, store, timedelta(seconds=sealed.deadline_s))
        self._joined = sealed

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._joined = None


def backend_of(devices: Sequence[str]) -> str:
    """nccl if each member has a GPU of its own, else gloo: NCCL refuses two members on one GPU.

    `devices` has the UUID of each member's GPU, or cpu.
    """
    return "nccl" if CPU not in devices and len(set(devices)) == len(devices) else "gloo"


def _chunk_bytes(backend: str, device: torch.device) -> int:
    """The size of a chunk; on a GPU a small part of what is free there, which training shares."""
    if backend == "gloo":
        return CHUNK_BYTES[backend]
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return max(MIN_CHUNK_BYTES, min(CHUNK_BYTES[backend], free_bytes // (4 * IN_FLIGHT)))


class Sending:
    """One broadcast by rank 0, with IN_FLIGHT chunks at a time: one is on its way while the next is copied."""

    def __init__(self, group: ProcessGroup, device: torch.device, *, deadline: float, stall_s: float) -> None:
        """Chunks are sent from `device`. `deadline` is of the monotonic clock; one chunk may take `stall_s`."""
        self._group = group
        self._device = device
        self._deadline = deadline
        self._stall_s = stall_s
        self._under_way: deque[tuple[Work, torch.Tensor]] = deque()  # each with its chunk, which must live as long

    def send(self, buffer: torch.Tensor, chunk_bytes: int) -> None:
        """Send the flat `buffer`. Raises RuntimeError if the group fails or is too slow."""
        for piece in torch.split(buffer, chunk_bytes):
            if len(self._under_way) == IN_FLIGHT:
                self._await_oldest()
            chunk = piece.to(self._device, non_blocking=True)
            options = BroadcastOptions()
            options.timeout = timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))
            self._under_way.append((self._group.broadcast([chunk], options), chunk))
        while self._under_way:
            self._await_oldest()

    def _await_oldest(self) -> None:
        work, chunk = self._under_way.popleft()
        deadline = min(self._deadline, time.monotonic() + self._stall_s)
        # On a GPU, `wait` only makes the stream wait, and never returns if a receiver has died.
        while chunk.is_cuda and not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a chunk of {chunk.nbytes} bytes was not sent before the group's deadline")
            time.sleep(CHUNK_POLL_S)
        work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))


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
    # With an explicit address: by default gloo uses what the host name resolves to, often not reachable from others.
    gloo._devices = [ProcessGroupGloo.create_device(hostname=sealed.host)]
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, ProcessGroupGloo(store, 0, size, gloo))
    return group
