"""A process that a supervisor starts, watches, restarts, and ends."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

MAX_RESTARTS = 5
BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
LOG_TAIL_LINES = 15
EXIT_BAD_INPUT = 2


class Child:
    """One process in a session of its own, so that Ctrl-C in the terminal reaches the supervisor alone."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.command = list(command)
        self._log = log
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._num_restarts = 0
        self._restart_at = 0.0

    def start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
                start_new_session=True,
            )  # fmt: skip

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def keep_up(self) -> bool:
        """Start it again, after a pause, if it crashed; False once it has crashed too often or was given bad input."""
        if self.exit_code in (None, 0):
            return True
        if self.exit_code == EXIT_BAD_INPUT or self._num_restarts >= MAX_RESTARTS:
            return False
        now = time.monotonic()
        if self._restart_at == 0.0:
            self._restart_at = now + BACK_OFF_S[self._num_restarts]
        elif now >= self._restart_at:
            self._num_restarts += 1
            self._restart_at = 0.0
            self.start()
        return True

    def ask_to_end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end; after `timeout_s`, force it on the process and all that it started."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def last_words(self) -> str:
        """The end of its log, for an error message."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-LOG_TAIL_LINES:])
