"""A process that works for one object, with a folder of its own; nothing of either is left when that object lets go."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from common.shutdown import die_with_parent

MAX_SAID_CHARS = 1000


class OwnProcess:
    """A process in a group of its own, which `end` kills as a whole; it ends, too, with the thread that started it."""

    def __init__(self, *, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"slipstream-{name}-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, arguments: Sequence[str | Path], *, env: Mapping[str, str], pass_fds: Collection[int] = ()
    ) -> None:  # fmt: skip
        """What it says is `said`, and its temporary files are in the folder."""
        with (self.folder / "said").open("wb") as said:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**env, "TMPDIR": str(self.folder)},
                pass_fds=pass_fds,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    @property
    def is_over(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def said(self) -> str:
        """The end of what it has said so far."""
        try:
            return (self.folder / "said").read_text(errors="replace")[-MAX_SAID_CHARS:]
        except FileNotFoundError:
            return ""

    def end(self) -> None:
        """Kill the group, and remove the folder. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # what was killed may still have been writing
