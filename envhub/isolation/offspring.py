"""Mark the processes that an episode's environment starts, and kill them at the end of the episode.

The mark is an environment variable. Child processes inherit it, also through a double fork into a new session. An audit
hook sets it whenever this process starts another one; a context variable tells it the episode. Four kinds of processes
do not carry the mark and are not found: a fork without an exec, those of `multiprocessing`, a process started with an
empty environment, and a process started from a thread that the environment made (`OwnThread` passes the episode on).
Processes that episodes share must be started in a context without an episode, as in `verifiers_host.py`.
"""

import contextlib
import functools
import itertools
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, MutableMapping
from contextvars import ContextVar
from pathlib import Path

MARK = "SLIPSTREAM_EPISODE"
_STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system")
_NUM_QUIET = 2  # looks in a row that find nothing new
_MAX_LOOKS = 200
_START_S = 1.0  # time for a process to begin a program, on a busy machine
_POLL_S = 0.001
_ENDING, _OF_THE_KERNEL = 0x4, 0x200000  # PF_EXITING and PF_KTHREAD

log = logging.getLogger(__name__)

_numbers = itertools.count()
_episode: ContextVar[str] = ContextVar("episode", default="")
_num_started = Counter[str]()  # by episode: most episodes start no process, and need no search


def begin_episode() -> str:
    """Return the mark of all processes that the current task and its child tasks start from now on."""
    _install_hook()
    mark = f"{_owner(os.getpid())}{next(_numbers)}"
    _episode.set(mark)
    return mark


def end_offspring(mark: str) -> int:
    """Kill all processes with `mark`, and return their number. Blocks: it reads /proc."""
    if not _num_started.pop(mark, 0):
        return 0
    return _end(f"{MARK}={mark}\0".encode())


def end_offspring_of(*pids: int) -> int:
    """Kill all processes that the episodes of the processes `pids` have left, and return their number.

    Call it after those processes were killed or have crashed, because they did not end their episodes.
    """
    return _end(*(f"{MARK}={_owner(pid)}".encode() for pid in pids))


def _owner(pid: int) -> str:
    """Return the prefix of process `pid`'s marks. It names the namespace too, because pids are unique only in one."""
    return f"{Path('/proc/self/ns/pid').readlink()}.{pid}."


def _end(*marks: bytes) -> int:
    """Kill all processes whose environment contains one of `marks`, and return their number.

    One look at /proc misses a process that was forked after the list was read by one that then ended. So this looks
    until two looks in a row show no such process, and no new process that ended before its environment could be read.
    """
    ended, seen, num_quiet = set[int](), {os.getpid()}, 0
    for _ in range(_MAX_LOOKS):
        pids = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()} - {os.getpid()}
        num_quiet += 1
        for pid in sorted(pids - ended, reverse=True):  # newest first: a process that forks and ends is among them
            environment = b"\0" + _environment(pid)
            if any(b"\0" + mark in environment for mark in marks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                ended.add(pid)
                num_quiet = 0
            elif environment == b"\0" and pid not in seen:
                num_quiet = 0
        if num_quiet == _NUM_QUIET:
            return len(ended)
        seen |= pids
    log.warning("some processes of an episode may still run: %d looks at /proc always showed new ones", _MAX_LOOKS)
    return len(ended)


def _environment(pid: int) -> bytes:
    """Return the environment of a process; empty if it has none or has ended.

    In the middle of an execve a process has none: this waits until the new program has its environment.
    """
    deadline = time.monotonic() + _START_S
    try:
        while not (environment := Path(f"/proc/{pid}/environ").read_bytes()) and _begins(pid):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
    except PermissionError:
        return MARK.encode()  # of another user, who cannot be one of ours
    except OSError:
        return b""
    return environment


def _begins(pid: int) -> bool:
    """Whether a process whose environment was empty is about to have one. Raises OSError if it has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    flags, start, end = int(fields[6]), fields[47], fields[48]
    return not flags & (_ENDING | _OF_THE_KERNEL) and (end == "0" or start != end)


@functools.cache
def _install_hook() -> None:
    """Install the audit hook, once in a process because a hook cannot be removed."""
    sys.addaudithook(_mark)


def _mark(event: str, arguments: tuple[object, ...], starts: Collection[str] = _STARTS) -> None:
    """Mark a process before it starts: in this process's environment, or in the one passed to it.

    `starts` is an argument because Python still calls hooks at its end, when the names of this module are None.
    """
    if event not in starts:
        return
    episode = _episode.get()
    _num_started[episode] += bool(episode)
    os.putenv(MARK, episode)
    given = arguments[-1] if event in ("subprocess.Popen", "os.posix_spawn") else None
    if isinstance(given, MutableMapping):
        given[MARK] = episode
