"""The copy of a version: every rank of rank 0's host writes its part into the same slot, then rank 0 submits it."""

import mmap
import time

import msgspec
import torch
import torch.distributed as dist

from slipstream.common.process.config_error import ConfigError
from slipstream.common.transfer.host_memory import Mapped, map_memory
from slipstream.common.transfer.probe import Probe
from slipstream.learner.publisher.publish import Publisher
from slipstream.learner.publisher.published import Published
from slipstream.learner.publisher.slots import NotTheLayout, Slots
from slipstream.learner.ranks.ranks import Ranks, share
from slipstream.replay.records.keys import FencedOut


class _Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From rank 0: which slot to write."""

    slot: int
    refusal: str  # why this learner may not publish any more; empty if it may


class VersionWriter:
    """One rank's part in publishing; every rank has one, and calls `publish` with the same arguments."""

    def __init__(self, published: Published, *, ranks: Ranks, publisher: Publisher | None) -> None:
        """Map the slots of `publisher`, which only rank 0 has. Collective. Raises ConfigError."""
        self._published = published
        self._ranks = ranks
        self._publisher = publisher
        paths = share(publisher.slot_paths if publisher else None, list, ranks=ranks)
        self._slots: Slots | None = publisher.slots if publisher else None
        if not publisher and published.own:
            memory = [_mapped(path) for path in paths]
            self._slots = Slots(memory, published.layout, own=published.own)

    def publish(self, *, policy_version: int, probe: Probe) -> None:
        """Publish the present weights. Collective; returns once all ranks have written their parts.

        Raises FencedOut on every rank, and NotTheLayout on every rank if one of them could not write its part.
        """
        turn = share(self._begin() if self._publisher else None, _Turn, ranks=self._ranks)
        if turn.refusal:
            raise FencedOut(turn.refusal)
        begun_at = time.perf_counter()
        num_bytes, problem = self._write(turn.slot)
        copy_s = time.perf_counter() - begun_at
        self._check_whole(num_bytes, problem, policy_version)
        if self._publisher:
            self._publisher.submit(turn.slot, policy_version=policy_version, probe=probe, copy_s=copy_s)

    def close(self) -> None:
        """Unmap the slots; those of rank 0 are its publisher's."""
        if self._slots is not None and self._publisher is None:
            self._slots.close()

    def _begin(self) -> _Turn:
        assert self._publisher is not None
        try:
            return _Turn(slot=self._publisher.free_slot(), refusal="")
        except FencedOut as error:
            return _Turn(slot=-1, refusal=str(error))

    def _write(self, slot: int) -> tuple[int, str]:
        """The bytes that this rank has written, and what was wrong."""
        if self._slots is None:
            for _ in self._published.tensors():
                pass
            return 0, ""
        try:
            return self._slots.write(slot, self._published.tensors()), ""
        except NotTheLayout as error:
            return 0, str(error)

    def _check_whole(self, num_bytes: int, problem: str, policy_version: int) -> None:
        """Raise NotTheLayout unless the parts that the ranks have written are all bytes of the layout."""
        expected = sum(entry.num_bytes for entry in self._published.layout)
        written = torch.tensor(num_bytes, device=self._ranks.device)
        dist.all_reduce(written)
        if problem or int(written) != expected:
            raise NotTheLayout(
                f"version {policy_version} is not published: {problem or 'another rank could not write its part'}; the "
                f"ranks have written {int(written)} of {expected} bytes"
            )


def _mapped(path: str) -> Mapped:
    try:
        return map_memory(path, access=mmap.ACCESS_WRITE)
    except OSError as error:
        raise ConfigError(
            f"a rank of the learner cannot map the memory of rank 0 at {path}: {error}; start all ranks of a host as "
            "one user and in one container"
        ) from error
