"""The state of a run, for every verb that trains one: a file in the run's directory has it.

The process that trains the run keeps the file locked while it lives. So one that was killed is not taken for running.
"""

import contextlib
import enum
import fcntl
import os
import time
from collections.abc import Callable

from slipstream.common.process.metrics import newest_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import STOPPED_CODES


class Standing(enum.Enum):
    """How far a run has come, or how it ended."""

    STARTING = "starting"
    """A process trains it, and has recorded nothing yet."""
    RUNNING = "running"
    """A process trains it."""
    FINISHED = "finished"
    """Its last step is made, and its model is exported."""
    FAILED = "failed"
    """It ended with an error."""
    STOPPED = "stopped"
    """It was asked to stop, or killed; or no process has trained it yet."""

    @property
    def is_live(self) -> bool:
        return self in (Standing.STARTING, Standing.RUNNING)


def standing(run_dir: RunDir) -> Standing:
    try:
        with run_dir.state.open() as file:
            word, _, begun_s = file.read().partition(" ")
            if not Standing(word).is_live:
                return Standing(word)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return Standing.STOPPED
            except OSError:  # it is locked, or the file system knows no locks
                newest = newest_metrics(run_dir.metrics, 1)
                has_begun = newest and newest[0].get("time", 0.0) >= float(begun_s)
    except (OSError, ValueError):
        return Standing.STOPPED
    return Standing.RUNNING if has_begun else Standing.STARTING


def training(run_dir: RunDir, verb: Callable[[], int]) -> int:
    """Run `verb`, which trains the run, and write the run's state as it begins and as it ends; return its exit code."""
    if os.environ.get("RANK", "0") != "0":
        return verb()
    unnamed = run_dir.state.with_suffix(f".{os.getpid()}")
    with unnamed.open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        os.set_inheritable(file.fileno(), True)  # torchrun replaces this process
        file.write(f"{Standing.STARTING.value} {time.time()}")
        file.flush()
        # A new file: an earlier process, which this one replaces, may still have the old one open.
        unnamed.replace(run_dir.state)
        ended = Standing.FAILED
        try:
            code = verb()
            ended = Standing.FINISHED if code == 0 else Standing.STOPPED if code in STOPPED_CODES else Standing.FAILED
        finally:
            file.seek(0)
            file.truncate()
            file.write(ended.value)
    return code
