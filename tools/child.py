"""A process that a supervisor starts, watches, restarts, and ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from common.shutdown import die_with_parent

MAX_RESTARTS = 5
BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
WELL_S = 600.0  # what ran for so long was well: its earlier crashes count no more
LOG_TAIL_LINES = 15
EXIT_BAD_INPUT = 2


class Child:
    """One process in a session of its own, so that Ctrl-C in the terminal reaches the supervisor alone.

    It is asked to end when the supervisor's main thread ends, whatever the program.
    """

    def __init__(self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._num_restarts = 0
        self._started_at = 0.0
        self._restart_at = 0.0

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._started_at = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
                start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid()),
            )  # fmt: skip

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def keep_up(self) -> bool:
        """Start it again, after a pause, if it crashed; False once it has crashed too often or was given bad input."""
        if self.exit_code in (None, 0):
            return True
        now = time.monotonic()
        if self._restart_at == 0.0 and now - self._started_at > WELL_S:
            self._num_restarts = 0
        if self.exit_code == EXIT_BAD_INPUT or self._num_restarts >= MAX_RESTARTS:
            return False
        if self._restart_at == 0.0:
            self._restart_at = now + BACK_OFF_S[self._num_restarts]
        elif now >= self._restart_at:
            self._num_restarts += 1
            self._restart_at = 0.0
            print(f"{self.name} ended with code {self.exit_code}: started again, see {self.log}", flush=True)
            self.start()
        return True

    @property
    def pid(self) -> int | None:
        """Of the process that was started last; None before that."""
        return None if self._process is None else self._process.pid

    def send(self, number: signal.Signals) -> None:
        """A signal, to this very process."""
        if self._process is not None:
            self._process.send_signal(number)

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
        """Force the end on the process and on all that it started."""
        if self._process is not None and self._process.poll() is None:
            process = psutil.Process(self._process.pid)
            kill([process, *process.children(recursive=True)])
            self._process.wait()

    def last_words(self) -> str:
        """Why it ended, from its log: one line where it was given bad input, else where the log stops."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        num_lines = 1 if self.exit_code == EXIT_BAD_INPUT else LOG_TAIL_LINES
        return "\n".join(lines[-num_lines:])


def say_last_words(verb: str, child: Child) -> None:
    """Tell the person at the terminal why `child` failed for good: on one line where it could say so itself."""
    words = child.last_words()
    if child.exit_code == EXIT_BAD_INPUT:
        print(words, file=sys.stderr)
    else:
        told = f"{child.name} ended with {child.exit_code}; {child.log} ends:"
        print(f"slipstream {verb}: {told}\n{words}", file=sys.stderr)


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill -9, parents before their children, so that nobody starts what has just been killed again."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
