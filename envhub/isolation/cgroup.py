"""A cgroup (v2) for each run of the sandbox, which limits the memory and the processes of the whole run.

It is used if this process may make cgroups with the controllers memory and pids: in its own cgroup, or next to it. The
limits of each process hold in any case. https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

import asyncio
import functools
import logging
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from slipstream.envhub.env import EnvError

GATE = ("/bin/sh", "-c", 'read -r _ && exec "$@"', "gate")  # runs its arguments after it has read a line
REMOVE_S = 5.0  # the kernel takes a moment to end the processes of a killed cgroup
POLL_S = 0.005

log = logging.getLogger(__name__)


@functools.cache
def parent() -> Path | None:
    """Return the cgroup in which runs get their cgroups, or None if this process may make none. Logs which, once."""
    mounts, own = (Path("/proc/self", name).read_text() for name in ("mounts", "cgroup"))
    found = next(filter(is_usable, candidates(mounts=mounts, own=own)), None)
    if found is None:
        log.info("sandbox: no writable cgroup v2 with the controllers memory and pids; memory is limited per process")
    else:
        log.info("sandbox: each run gets a cgroup in %s, which limits the memory and processes of the run", found)
    return found


def candidates(*, mounts: str, own: str) -> list[Path]:
    """Return this process's cgroup and the one above it, from the texts of /proc/self/mounts and /proc/self/cgroup."""
    mounted = [mount for _, mount, kind, *_ in map(str.split, mounts.splitlines()) if kind == "cgroup2"]
    paths = [line.removeprefix("0::/") for line in own.splitlines() if line.startswith("0::/")]
    return [
        folder
        for mount in mounted
        for path in paths
        for folder in (Path(mount, path), *([Path(mount, path).parent] if path else []))
    ]


def is_usable(folder: Path) -> bool:
    """Whether this process can make a cgroup with limits in `folder` and move a process into it. Tries it."""
    process, probe = subprocess.Popen(["/bin/sleep", "60"], cwd="/"), None
    try:
        if not {"memory", "pids"} <= set((folder / "cgroup.subtree_control").read_text().split()):
            (folder / "cgroup.subtree_control").write_text("+memory +pids")
        probe = create(folder, memory_bytes=1 << 24, max_pids=8)
        enter(probe, process.pid)
    except OSError:
        return False
    finally:
        process.kill()
        process.wait()
        if probe is not None:
            with suppress(OSError):
                probe.rmdir()
    return True


def create(folder: Path, *, memory_bytes: int, max_pids: int) -> Path:
    """Make a cgroup in `folder` with these limits and without swap. Raises OSError."""
    cgroup = Path(tempfile.mkdtemp(prefix="slipstream-", dir=folder))
    try:
        (cgroup / "memory.max").write_text(str(memory_bytes))
        (cgroup / "pids.max").write_text(str(max_pids))
        with suppress(PermissionError):  # the file is missing in a kernel without swap, and cannot be created
            (cgroup / "memory.swap.max").write_text("0")
    except OSError:
        cgroup.rmdir()
        raise
    return cgroup


def enter(cgroup: Path, pid: int) -> None:
    """Move a process into `cgroup`; the processes that it starts from then on are in it too. Raises OSError."""
    (cgroup / "cgroup.procs").write_text(str(pid))


async def remove(cgroup: Path) -> None:
    """Kill every process in `cgroup`, and remove it."""
    with suppress(OSError):  # Linux before 5.14 has no cgroup.kill; the sandbox's processes were killed before
        (cgroup / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + REMOVE_S
    while not _is_removed(cgroup):
        if time.monotonic() > deadline:
            log.warning("could not remove the cgroup %s: it still has processes", cgroup)
            return
        await asyncio.sleep(POLL_S)


def _is_removed(cgroup: Path) -> bool:
    try:
        cgroup.rmdir()
    except OSError:
        return False
    return True


@asynccontextmanager
async def limited(*, memory_bytes: int, max_pids: int) -> AsyncIterator[Path | None]:
    """Yield a new cgroup with these limits, or None if this process may make none; kill and remove it on exit."""
    folder = parent()
    if folder is None:
        yield None
        return
    try:
        cgroup = create(folder, memory_bytes=memory_bytes, max_pids=max_pids)
    except OSError as error:
        raise EnvError(f"could not make a cgroup for the sandbox in {folder}: {error}") from error
    try:
        yield cgroup
    finally:
        await remove(cgroup)
