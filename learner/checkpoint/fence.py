"""Which process may write a folder of checkpoints: the last one that took it over.

Redis fences an old learner out of the ledger. Files need a fence of their own. A learner that was stopped after it had
asked Redis, and before it wrote, would otherwise add a checkpoint of steps that its successor has given back. A later
start would resume from it, and train those groups twice.
"""

import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import try_lock
from slipstream.replay.records.keys import FencedOut

TAKEOVER_TIMEOUT_S = 120.0  # a writer holds the lock while it writes a manifest and removes old checkpoints
POLL_S = 0.05

log = logging.getLogger(__name__)


class Fence:
    """The fence of one folder, as one process sees it. Its file lies beside the folder: `checkpoints.writer`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder.with_suffix(".writer")
        self._token = ""

    def take(self, check: Callable[[], None] = lambda: None) -> None:
        """Fence out every earlier writer. Waits for the one that writes at this moment.

        `check` raises FencedOut if a later writer has announced itself. No other process takes over while it runs, so
        a later one takes over afterwards. Raises ConfigError where the earlier writer does not finish: it has been
        stopped in the middle of a write.
        """
        self._token = f"{uuid.uuid4().hex} process {os.getpid()} on {socket.gethostname()}"
        with self._locked() as descriptor:
            check()
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, self._token.encode(), 0)
            os.fsync(descriptor)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No other process takes over meanwhile. Raises FencedOut where another process has done so."""
        with self._locked() as descriptor:
            self._check(_owner(descriptor))
            yield

    def check(self) -> None:
        """Raise FencedOut where another process has taken over; it may do so at any time after this look."""
        with self._file.open("rb") as file:
            self._check(_owner(file.fileno()))

    def _check(self, owner: str) -> None:
        if owner != self._token:
            raise FencedOut(
                f"another learner has taken over {self._file.parent}, {owner.partition(' ')[2]}: this one writes "
                "nothing there from now on"
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + TAKEOVER_TIMEOUT_S
        while not try_lock(descriptor, self._file):
            if time.monotonic() > deadline:
                owner = _owner(descriptor).partition(" ")[2]
                raise ConfigError(
                    f"{owner} has held {self._file} for {TAKEOVER_TIMEOUT_S:.0f} s and does not let go: end that "
                    "process, which has been stopped in the middle of a checkpoint, and start again"
                )
            time.sleep(POLL_S)


def _owner(descriptor: int) -> str:
    return os.pread(descriptor, 512, 0).decode(errors="replace")
