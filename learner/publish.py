"""The learner's side of publishing: a copy into shared memory, and a word to the publisher process.

Nothing here waits for an actor, for Redis or for a hash: a version that the publisher has not begun when a newer one
comes is overtaken by it.
"""

import contextlib
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from common.blob_store import run_store
from common.weights import Adapted, TensorEntry, buffer_bytes
from learner.publisher.messages import (
    Announced,
    Broadcasted,
    Freed,
    Refused,
    Served,
    Settings,
    Stop,
    Submitted,
    ToLearner,
    ToProcess,
    Withdraw,
)
from learner.publisher.shelf import num_slots
from replay.keys import FencedOut

log = logging.getLogger(__name__)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

WATCH_S = 1.0
ANSWER_S = 30.0  # the publisher answers in milliseconds once it has started; past this it is wedged, and replaced


@dataclass(kw_only=True, slots=True)
class PublishStats:
    """What has been published so far."""

    num_published: int = 0  # versions announced
    num_skipped: int = 0  # versions overtaken by a newer one before they were announced
    num_restarts: int = 0  # publisher processes that died and were replaced
    num_broadcasts: int = 0  # broadcasts that were whole
    served_bytes: int = 0  # pulled from the process that runs now, up to its last announcement
    announced_version: int = -1  # the newest one announced
    num_bytes: int = 0  # of that one, for a receiver of the one before: its delta, or whole
    blocked_s: float = 0.0  # of the last publish: all that the learner waited for, the copy in it
    copy_s: float = 0.0  # of the last publish: the copy alone
    broadcast_s: float = 0.0  # of the last broadcast that was whole: the sending
    num_receivers: int = 0  # of the last broadcast that was whole


class Publisher:
    """Publishes weights from learner rank 0. Owns the publisher process and the shared memory between the two.

    The memory has no name (memfd), so nothing is left behind however either side ends. It is three times the weights,
    four times where deltas are made. Construct it on a thread that lives as long as it: the process dies with the
    thread that started it.
    """

    def __init__(
        self,
        entries: list[TensorEntry],
        *,
        redis_url: str,
        run_id: str,
        learner_epoch: int,
        host: str,
        chunk_bytes: int,
        anchor_every: int,
        broadcast_timeout_s: float,
        log_path: Path,
        adapted: Adapted | None = None,
        disk: str = "",
        fan_out: int = 8,
        pull_bytes_per_s: int = 0,
        device: str = "cpu",
    ) -> None:
        """Lay out `entries` in shared memory; every version consists of these tensors, in their order.

        They are adapters where `adapted` says of what. `disk` is where they are written as well, a path or fsspec URL.
        """
        if disk:
            run_store(disk, run_id)  # what cannot be had is refused here, and not in the process, again and again
        self._settings = Settings(
            redis_url=redis_url,
            run_id=run_id,
            learner_epoch=learner_epoch,
            host=host,
            chunk_bytes=chunk_bytes,
            anchor_every=anchor_every,
            fan_out=fan_out,
            pull_bytes_per_s=pull_bytes_per_s,
            broadcast_timeout_s=broadcast_timeout_s,
            device=device,
            entries=entries,
            adapted=adapted,
            disk=disk,
        )
        self._close_timeout_s = 2 * broadcast_timeout_s
        self._log_path = log_path
        self._stats = PublishStats()
        self._refusal = ""
        self._slot_fds = [
            os.memfd_create(f"slipstream-weights-{slot}") for slot in range(num_slots(anchor_every=anchor_every))
        ]
        self._entries = entries
        self._slots = [_mapped(fd, entries) for fd in self._slot_fds]
        self._free_slots: list[int] = []
        self._newest: Submitted | None = None  # None where its slot has been given back
        self._start()
        self._using = threading.Lock()  # by the learner's thread, or by the one that watches
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watch-publisher", daemon=True).start()

    @property
    def stats(self) -> PublishStats:
        """What has been published so far, as far as the publisher process has said; a dead one is replaced."""
        with self._using:
            self._tend()
            return replace(self._stats)

    @property
    def pid(self) -> int:
        """Of the publisher process."""
        return self._process.pid

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, policy_version: int) -> None:
        """Copy `tensors`, one at a time and none kept, and have them published as `policy_version`.

        Returns after the copy. Raises FencedOut once the publisher process has been told that a newer learner or newer
        weights are there, and ValueError for tensors that are not those laid out; then nothing is published.
        """
        begun = time.perf_counter()
        with self._using:
            slot = self._free_slot()
            self._stats.copy_s = self._copy(tensors, slot)
            self._free_slots.remove(slot)
            self._newest = Submitted(slot=slot, policy_version=policy_version)
            self._submit(self._newest)
            self._stats.blocked_s = time.perf_counter() - begun

    def close(self) -> None:
        """Let the publisher process finish what was submitted, for two broadcast timeouts at most, and end it."""
        with self._using:
            if self._process.returncode is not None:
                self._closed.set()
                return
            try:
                self._send(Stop())
                self._process.wait(self._close_timeout_s)
            except (OSError, subprocess.TimeoutExpired) as error:
                log.warning("the publisher process does not end by itself: %s", repr(error))
            self._end()
            self._closed.set()
        self._slots.clear()
        for fd in self._slot_fds:
            os.close(fd)

    def _watch(self) -> None:
        """Replace the process where it died while the learner waits: for actors, who wait for weights.

        It dies with the thread that started it, which may be this one; so this one ends behind it.
        """
        while not self._closed.wait(WATCH_S):
            with self._using, contextlib.suppress(OSError):  # of one that died at once: the next look finds it
                if not self._closed.is_set():
                    self._tend()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self._log_path.open("ab") as log_file:
            command = [sys.executable, "-m", "learner.serve_weights", *map(str, [theirs.fileno(), *self._slot_fds])]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), *self._slot_fds],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
            )
        self._connection = Connection(ours.detach())
        self._free_slots = [
            slot for slot in range(len(self._slots)) if self._newest is None or slot != self._newest.slot
        ]
        self._send(self._settings)
        if self._newest is not None:
            self._send(self._newest)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _restart(self, error: BaseException) -> None:
        log.warning("the publisher process is replaced: %s; see %s", repr(error), self._log_path)
        self._end()
        self._start()
        self._stats.num_restarts += 1

    @torch.no_grad()
    def _copy(self, tensors: Iterable[tuple[str, torch.Tensor]], slot: int) -> float:
        """Return the seconds that copying took, without those in which the tensors were made."""
        copy_s, missing = 0.0, set(self._slots[slot])
        for name, tensor in tensors:
            place = self._slots[slot].get(name)
            if place is None or (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
                found = "nothing" if place is None else f"{place.dtype} {list(place.shape)}"
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; the layout has {found} of that name")
            begun = time.perf_counter()
            place.copy_(tensor)
            copy_s += time.perf_counter() - begun
            missing.discard(name)
            del tensor  # before the next is made
        if missing:
            raise ValueError(f"a version consists of all tensors laid out; {sorted(missing)} did not come")
        return copy_s

    def _free_slot(self) -> int:
        self._tend()
        if self._refusal:
            raise FencedOut(self._refusal)
        try:
            if not self._free_slots:
                self._send(Withdraw())
                self._await_slot()
        except (OSError, EOFError) as error:
            self._restart(error)
        return self._free_slots[0]

    def _await_slot(self) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not self._free_slots:
            if not self._connection.poll(deadline - time.monotonic()):
                raise TimeoutError(f"no answer in {ANSWER_S} s")
            self._note(self._connection.recv_bytes())

    def _tend(self) -> None:
        """Take note of what the publisher process has said; replace it if it died."""
        try:
            while self._connection.poll():
                self._note(self._connection.recv_bytes())
        except (OSError, EOFError) as error:
            self._restart(error)

    def _note(self, message: bytes) -> None:
        match msgspec.msgpack.decode(message, type=ToLearner):
            case Freed(slot=slot, skipped=skipped):
                self._free_slots.append(slot)
                if self._newest is not None and slot == self._newest.slot:
                    self._newest = None  # its bytes are about to be another version's
                self._stats.num_skipped += skipped
            case Announced(policy_version=version, num_bytes=num_bytes):
                self._stats.num_published += 1
                self._stats.num_bytes = num_bytes
                self._stats.announced_version = version
            case Broadcasted(broadcast_s=broadcast_s, num_receivers=num_receivers):
                self._stats.num_broadcasts += 1
                self._stats.broadcast_s = broadcast_s
                self._stats.num_receivers = num_receivers
            case Served(total_bytes=total_bytes):
                self._stats.served_bytes = total_bytes
            case Refused(reason=reason):
                self._refusal = reason

    def _submit(self, message: Submitted) -> None:
        try:
            self._send(message)
        except OSError as error:
            self._restart(error)  # which sends the newest version

    def _send(self, message: ToProcess) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(message))


def _mapped(fd: int, entries: list[TensorEntry]) -> dict[str, torch.Tensor]:
    """The tensors of a slot by name, as views of its memory."""
    num_bytes = buffer_bytes(entries)
    os.ftruncate(fd, num_bytes)
    # Populated now: page faults would make the first copy into each slot several times slower than the later ones.
    slot = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    flat = torch.frombuffer(slot, dtype=torch.uint8)
    return {
        entry.name: flat[entry.offset : entry.offset + entry.num_bytes]
        .view(TORCH_DTYPES[entry.dtype])
        .view(entry.shape)
        for entry in entries
    }
