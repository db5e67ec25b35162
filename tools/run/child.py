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

from slipstream.common.process.printable import printable_block
from slipstream.common.process.shutdown import die_with_parent
from slipstream.envhub.isolation.offspring import end_offspring_of
from slipstream.replay.run.observer import last_error

MAX_RESTARTS = 5
CURE = "lower actors.max_episodes, actors.count or learner.micro_batch_tokens, or end other programs"
BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_S = 600.0  # a process that ran this long was stable: its earlier crashes are not counted
LEARNER_GRACE_S = 600.0  # to end its step and write a checkpoint, which may be large and its disk slow
LOG_TAIL_LINES = 15
MAX_READ_BYTES = 1 << 20  # of a log at a time
EXIT_BAD_INPUT = 2
RESTARTED = "; restarting it, see "  # in the line that a supervisor prints
COUNTS = Path("/proc/vmstat")  # of the kernel, since the host or its container started
TORCHRUN = "torch/distributed/elastic/"  # in what torchrun logs


def verb_command(*words: str) -> list[str]:
    """The command that runs `slipstream` with `words` by this Python."""
    return [sys.executable, "-P", "-m", "slipstream.tools.cli.cli", *words]


class Child:
    """One process in its own session, so that Ctrl-C in the terminal reaches only the supervisor.

    The kernel sends it SIGTERM when the supervisor's main thread ends.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        output: Path | None = None,
    ) -> None:
        """Its standard output replaces the file `output`, if one is given; else it is added to `log`."""
        self.name = name
        self.command = list(command)
        self.log = log
        self._output = output
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._num_restarts = 0
        self._started_at = 0.0
        self._killed_for_memory = 0  # processes of this host, when it was started
        self._restart_at = 0.0
        self._log_bytes = 0  # of its log, which `new_lines` has read

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._started_at, self._killed_for_memory = time.monotonic(), killed_for_memory()
        if self._process is None and self.log.exists():  # of an earlier sitting
            self._log_bytes = self.log.stat().st_size
        with self.log.open("ab") as log, self._output.open("wb") if self._output else log as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return None if self._process is None else self._process.poll()

    def keep_up(self) -> bool:
        """Restart it after a pause if it crashed; return False if it crashed too often or rejected its input."""
        if self.exit_code in (None, 0):
            return True
        now = time.monotonic()
        if self._restart_at == 0.0:
            self._end_offspring()
            if now - self._started_at > STABLE_S:
                self._num_restarts = 0
        if self.exit_code == EXIT_BAD_INPUT or self._num_restarts >= MAX_RESTARTS:
            return False
        if self._restart_at == 0.0:
            self._restart_at = now + BACK_OFF_S[self._num_restarts]
        elif now >= self._restart_at:
            self._restart_at = 0.0
            why = printable_block(last_error(self.log))
            print(f"{self.name} {self.ending}: {why}{RESTARTED}{self.log}", flush=True)
            if self.lacked_memory:
                print(f"FAULT: {self.lacked_memory}", flush=True)
            self._num_restarts += 1
            self.start()
        return True

    def new_lines(self, about: str) -> list[str]:
        """The lines with the text `about` that its log has got since the last call; of a long log a part."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            if log.seek(0, os.SEEK_END) < self._log_bytes:  # it was truncated
                self._log_bytes = 0
            log.seek(self._log_bytes)
            read = log.read(MAX_READ_BYTES)
        end = read.rfind(b"\n") + 1
        if not end and len(read) == MAX_READ_BYTES:  # a part of a line that is no message, such as a progress bar
            end = len(read)
        self._log_bytes += end
        return [line for line in read[:end].decode(errors="replace").splitlines() if about in line]

    @property
    def ending(self) -> str:
        """How it ended, in words, and after how many restarts."""
        code, tries = self.exit_code or 0, f" after {self._num_restarts} restarts" if self._num_restarts else ""
        how = f"ended with code {code}" if code >= 0 else f"was killed by signal {-code}, {signal.strsignal(-code)}"
        return how + tries

    @property
    def lacked_memory(self) -> str:
        """What to do if the kernel has killed a process for lack of memory since the last start; else empty."""
        if killed_for_memory() <= self._killed_for_memory:
            return ""
        return f"the kernel killed a process for lack of memory before {self.name} ended; {CURE}"

    @property
    def pid(self) -> int | None:
        """The id of the newest process; None before the first start."""
        return None if self._process is None else self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process only, not to its children; none if it has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def ask_to_end(self) -> None:
        """Send SIGTERM if it runs."""
        self.send(signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended; after `timeout_s`, kill it with all its descendants."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            print(f"{self.name} did not end within {timeout_s:g} s, and is killed; see {self.log}", file=sys.stderr)
            self.kill()
        else:
            self._end_offspring()

    def end(self, timeout_s: float) -> None:
        """Ask it to end, and wait; after `timeout_s`, kill it with all its descendants."""
        self.ask_to_end()
        self.wait(timeout_s)

    def kill(self) -> None:
        """Kill the process and all its descendants."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)
            kill_descendants(psutil.Process(self._process.pid))
            self._process.kill()
            self._process.wait()
            self._end_offspring()

    def _end_offspring(self) -> None:
        """End the processes of environments that an actor left: one that was killed could not end them."""
        if self.pid is not None and self.exit_code != 0:
            end_offspring_of(self.pid)

    def last_log_lines(self) -> str:
        """The end of its log, which has the reason of its end; only that one line if it rejected its input."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_READ_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        if self.exit_code != EXIT_BAD_INPUT:
            return printable_block("\n".join(lines[-LOG_TAIL_LINES:]))
        reasons = [line for line in lines if TORCHRUN not in line]  # it writes more after the reasons of its ranks
        return printable_block("\n".join(reasons[-1:]))


def print_failure(verb: str, child: Child) -> None:
    """Print why `child` failed: its own error message if it rejected its input, else the end of its log."""
    lines = child.last_log_lines()
    if child.exit_code == EXIT_BAD_INPUT:
        print(lines, file=sys.stderr)
    else:
        why = f"; {child.lacked_memory}" if child.lacked_memory else ""
        ended = f"{child.name} {child.ending}{why}; the last lines of {child.log}:"
        print(f"slipstream {verb}: {ended}\n{lines or '(none)'}", file=sys.stderr)


def failed_code(child: Child) -> int:
    """The exit code of a supervisor whose `child` failed: the child's, or 1 if a signal killed it."""
    return max(child.exit_code or 1, 1)


def killed_for_memory() -> int:
    """How many processes the kernel has killed for lack of memory; 0 where it does not count them."""
    try:
        counts = dict(line.split() for line in COUNTS.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counts.get("oom_kill", 0))


def kill_descendants(root: psutil.Process) -> None:
    """Kill all processes below `root`, and those that their environments have left.

    Each is first stopped, so that it starts no other, until a look shows no new one. A group is stopped at once: one
    after another, processes that each start the next would be faster on a busy machine.
    """
    stopped, groups = set[psutil.Process](), set[int]()
    while new := set(root.children(recursive=True)) - stopped:
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                group = os.getpgid(process.pid)
                if group == os.getpgrp():
                    process.suspend()
                elif group not in groups:
                    os.killpg(group, signal.SIGSTOP)
                    groups.add(group)
        stopped |= new
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    end_offspring_of(*(process.pid for process in stopped))
