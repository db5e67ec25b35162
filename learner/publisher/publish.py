"""Rank 0's side of publishing: the shared memory that weights are copied into, and the publisher process.

Nothing here waits for an actor, for Redis or for a hash. If the publisher has not started a version when a newer one
arrives, it skips the older one.
"""

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from slipstream.common.transfer.host_memory import AnonymousMemory
from slipstream.common.transfer.probe import Probe
from slipstream.common.transfer.weights import buffer_bytes
from slipstream.learner.publisher import messages
from slipstream.learner.publisher.slots import OwnRows, Slots
from slipstream.replay.records.keys import FencedOut

log = logging.getLogger(__name__)

WATCH_S = 1.0
ANSWER_S = 30.0  # a running publisher answers in milliseconds; after this long it has hung and is replaced


@dataclass(kw_only=True, slots=True)
class PublishStats:
    """Counts and times of publishing so far."""

    num_broadcasts: int = 0  # completed broadcasts
    copy_s: float = 0.0  # of the last publish: rank 0's part of what the learner waits for, to convert, gather and copy
    announced: messages.Announced = field(default_factory=messages.Announced)  # the newest
    broadcast_s: float = 0.0  # of the last completed broadcast: the sending alone


class Publisher:
    """Publishes weights from learner rank 0. Owns the publisher process and the memory that the two share.

    The memory is anonymous (memfd), so nothing is left behind, however either process ends. It is NUM_SLOTS times as
    large as the weights. The publisher process ends with the thread that started it, so construct this on a thread that
    lives at least as long.
    """

    def __init__(self, settings: messages.PublisherSettings, *, log_path: Path, own: OwnRows | None = None) -> None:
        """Lay out the tensors in shared memory, and start the publisher process, which logs to `log_path`.

        `own` are the rows that rank 0 writes; None if it writes all.
        """
        self._settings = settings
        self._log_path = log_path
        self._stats = PublishStats()
        self._refusal = ""
        self._memory = [
            AnonymousMemory(f"slipstream-weights-{slot}", buffer_bytes(settings.entries))
            for slot in range(messages.NUM_SLOTS)
        ]
        if own is None:
            own = {entry.name: None for entry in settings.entries}
        self.slots = Slots([each.mapped() for each in self._memory], settings.entries, own=own)
        self._newest: messages.Submitted | None = None  # None once its slot is free again
        self._start()
        self._using = threading.Lock()  # shared by the learner's thread and the watching thread
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watch-publisher", daemon=True).start()

    @property
    def slot_paths(self) -> list[str]:
        """Where other ranks of this host map the slots: see `map_memory`."""
        return [each.path for each in self._memory]

    @property
    def stats(self) -> PublishStats:
        """The current counts, from the messages of the publisher process so far; a dead process is replaced."""
        with self._using:
            self._read_messages()
            return replace(self._stats)

    def free_slot(self) -> int:
        """A slot to write the next version into; it stays free until `submit`.

        Waits for no actor. Raises FencedOut once the publisher process has found a newer learner or newer weights.
        """
        with self._using:
            self._read_messages()
            if self._refusal:
                raise FencedOut(self._refusal)
            try:
                if not self._free_slots:
                    self._send(messages.Withdraw())
                    self._await_slot()
            except (OSError, EOFError) as error:
                self._restart(error)
            return self._free_slots[0]

    def submit(self, slot: int, *, policy_version: int, probe: Probe | None, copy_s: float) -> None:
        """Have the publisher process publish what all ranks have written into `slot`, in `copy_s` on this rank."""
        with self._using:
            self._free_slots.remove(slot)
            self._newest = messages.Submitted(slot=slot, policy_version=policy_version, probe=probe)
            try:
                self._send(self._newest)
            except OSError as error:
                self._restart(error)  # which sends the newest version
            self._stats.copy_s = copy_s

    def close(self) -> None:
        """Let the publisher process finish the submitted version, for at most two broadcast timeouts, then end it."""
        with self._using:
            if self._process.returncode is not None:
                self._closed.set()
                return
            try:
                self._send(messages.Stop())
                self._process.wait(2 * self._settings.broadcast_timeout_s)
            except (OSError, subprocess.TimeoutExpired) as error:
                log.warning("killing the publisher process, which did not exit when asked to: %s", repr(error))
            self._end()
            self._closed.set()
        self.slots.close()
        self._memory.clear()

    def _watch(self) -> None:
        """Replace a dead publisher process even while the learner waits for actors, which wait for weights.

        The process ends with the thread that started it, which may be this one; so this thread ends after the process.
        """
        while not self._closed.wait(WATCH_S):
            with self._using, contextlib.suppress(OSError):  # the new process died too: the next check finds it
                if not self._closed.is_set():
                    self._read_messages()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self._log_path.open("ab") as log_file:
            fds = [theirs.fileno(), *(each.fd for each in self._memory)]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream.learner.publisher.weight_server", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
            )
        self._connection = Connection(ours.detach())
        self._free_slots = [
            slot for slot in range(len(self._memory)) if self._newest is None or slot != self._newest.slot
        ]
        self._send(self._settings)
        if self._newest is not None:
            self._send(self._newest)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _restart(self, error: BaseException) -> None:
        log.warning("replacing the publisher process: %s; see %s", repr(error), self._log_path)
        self._end()
        self._start()

    def _await_slot(self) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not self._free_slots:
            if not self._connection.poll(deadline - time.monotonic()):
                raise TimeoutError(f"no answer within {ANSWER_S} s")
            self._handle(self._connection.recv_bytes())

    def _read_messages(self) -> None:
        """Read the messages of the publisher process; replace the process if it died."""
        try:
            while self._connection.poll():
                self._handle(self._connection.recv_bytes())
        except (OSError, EOFError) as error:
            self._restart(error)

    def _handle(self, message: bytes) -> None:
        match msgspec.msgpack.decode(message, type=messages.ToLearner):
            case messages.Freed(slot=slot):
                self._free_slots.append(slot)
                if self._newest is not None and slot == self._newest.slot:
                    self._newest = None  # its slot is about to be overwritten
            case messages.Announced() as announced:
                self._stats.announced = announced
            case messages.Broadcasted(broadcast_s=broadcast_s):
                self._stats.num_broadcasts += 1
                self._stats.broadcast_s = broadcast_s
            case messages.Refused(reason=reason):
                self._refusal = reason

    def _send(self, message: messages.ToProcess) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(message))
