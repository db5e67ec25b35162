"""Mark the processes that an episode's environment starts, and kill them at the end of the episode.

The mark is an environment variable. Child processes inherit it, also through a double fork into a new session. An audit
hook sets it whenever this process starts another one; a context variable tells it the episode. Three kinds of processes
do not carry the mark and are not found: a fork without an exec, a process started with an empty environment, and a
process started from a thread that the environment made (`OwnThread` passes the episode on). Processes that episodes
share must be started in a context without an episode, as in `verifiers_host.py`.
"""

import contextlib
import functools
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Collection, Iterator, MutableMapping
from contextvars import ContextVar
from pathlib import Path

MARK = "SLIPSTREAM_EPISODE"
_STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system")
_MAX_ROUNDS = 20  # a process that forks during one search is found in the next

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


def end_offspring_of(pid: int) -> int:
    """Kill all processes that the episodes of process `pid` have left, and return their number.

    Call it after that process was killed or has crashed, because it did not end its episodes.
    """
    return _end(f"{MARK}={_owner(pid)}".encode())


def _owner(pid: int) -> str:
    """Return the prefix of process `pid`'s marks. It names the namespace too, because pids are unique only in one."""
    return f"{Path('/proc/self/ns/pid').readlink()}.{pid}."


def _end(marked: bytes) -> int:
    """Kill all processes whose environment contains `marked`, and return their number."""
    ended = set[int]()
    for _ in range(_MAX_ROUNDS):
        found = set(_processes_with(marked)) - {os.getpid()}
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if found <= ended:
            break
        ended |= found
    return len(ended)


def _processes_with(marked: bytes) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if b"\0" + marked in b"\0" + (process / "environ").read_bytes():
                yield int(process.name)


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
