"""A process that belongs to one object, with a temporary folder; `end` removes both."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from slipstream.common.process.shutdown import die_with_parent

MAX_LOG_CHARS = 1000
_LOG = "log"


class OwnProcess:
    """A process in its own process group, which `end` kills. It also ends with the thread that started it."""

    def __init__(self, *, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"slipstream-{name}-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Sequence[str | Path], *, env: Mapping[str, str], pass_fds: Collection[int] = ()) -> None:
        """Start the process. Its output goes to a log in the folder, and so do its temporary files."""
        with (self.folder / _LOG).open("wb") as log:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**env, "TMPDIR": str(self.folder)},
                pass_fds=pass_fds,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    def log_tail(self) -> str:
        """Return the last characters of its output so far."""
        try:
            return (self.folder / _LOG).read_text(errors="replace")[-MAX_LOG_CHARS:]
        except FileNotFoundError:
            return ""

    def end(self) -> None:
        """Kill the process group and remove the folder. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # a killed process may still be writing to it
