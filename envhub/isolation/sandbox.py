"""Run untrusted commands in bubblewrap, without network, files, secrets and processes of the host.

A run is a function of a file tree. The tree goes in, a command runs on it, and the command's output and the resulting
tree come out. Nothing stays on the host, and the tree is never written to the host's disk. Environments judge an
episode outside the sandbox, by the tree and the output.

A command sees /usr (except `HIDDEN`) and the links in /etc/alternatives, read only. It also sees a home with the tree
and a /tmp, both of limited size, or a root directory instead of both (`Place`). The tree may be a layer over a folder
of the host that is too large to go in and out each time (`envhub/isolation/layer.py`). `Limits` lists the limits.
Memory is limited per process: a run can take at most `max_processes` times `memory_bytes`. Where this process may make
cgroups, the memory of the whole run is limited too (`envhub/isolation/cgroup.py`). `envhub/isolation/seccomp.py`
refuses system calls that these limits do not bound.

A command cannot make its run count as a failure of the environment. The driver is the first process of its namespace,
and the kernel lets no process of the namespace stop or kill it. Whatever else the command does, the run ends before
the step's deadline (`envhub/step_deadline.py`), and counts as the command's failure.
"""

import asyncio
import functools
import logging
import os
import shutil
import signal
import subprocess
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation import cgroup, layer, seccomp
from slipstream.envhub.isolation.driver import DRIVER, SETUP
from slipstream.envhub.isolation.file_tree import Tree, TreeError, pack, unpack
from slipstream.envhub.step_deadline import left_s

HOME = "/home/agent"
HIDDEN = ("/usr/local", "/usr/src")  # the parts of /usr that the host's packages do not own
MAX_COMMAND_CHARS = 20_000
START_S = 20.0  # time to start and to unpack the tree, on a busy machine
END_S = 10.0  # time to pack the tree after the command
RESERVED = 1 / 3  # the largest share of a step's remaining time that is kept for the start and the end
UNPRIVILEGED_ID = 65534
NUM_OWN_PIDS = 4  # processes of the sandbox itself, which `max_processes` does not count
KILLED = 137  # the exit code of a command that was killed at a limit

T = TypeVar("T")

log = logging.getLogger(__name__)
_NAMESPACES = ("unshare", "--map-root-user", "--mount", "--net")
_SOMAXCONN = "/proc/sys/net/core/somaxconn"
_STARTED = b"+"
_CUT = "\n[cut]"
PAGE_BYTES = 4096  # a file in memory takes a whole number of pages
SPARE_BYTES = 1 << 20  # memory beyond `tree_bytes`, so that a command can write when the tree fills all of these
SHM_BYTES = 1 << 20
_BASE = "/opt/base"
_LAYER = Path(layer.__file__).read_text()
_BESIDE_A_ROOT = ("/proc", "/dev", "/bin", "/lib", "/lib64", "/sbin", "/etc/alternatives")


class Place(Enum):
    """The folder that holds the tree of a run."""

    HOME = HOME  # a user's home; of the rest, only /tmp can be written
    # The root directory, for a user called root who can write everything except the host's /usr. This root has no
    # capabilities and is an unprivileged user of the host, so it has no other users, no packages and no mounts.
    ROOT = "/"
    # The folder in which SWE-bench's own images have the repository. The home exists too, and is empty.
    TESTBED = "/testbed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one run."""

    wall_s: float = 10.0
    cpu_s: int = 5  # for each process
    memory_bytes: int = 1 << 29  # of address space, for each process
    max_processes: int = 32
    max_open_files: int = 64  # for each process; this also bounds the data in its sockets and pipes
    max_waiting: int = 1  # connections that wait to be accepted, for each socket
    file_bytes: int = 4 << 20  # for each file
    tree_bytes: int = 8 << 20  # for the home, /tmp and the testbed each, or for the root directory
    kept_bytes: int = 32 << 20  # for the tar of the resulting tree
    output_bytes: int = 16_000  # of output; the rest is cut off


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The result of a run."""

    exit_code: int
    output: str  # ends with `notes`
    tree: Tree | None  # None if the resulting tree is too large or cannot be read
    processes: tuple[str, ...] = ()  # the names of the processes beside it; "" for one that has ended
    notes: str = ""  # the sandbox's remarks about the run

    @property
    def command_output(self) -> str:
        """The output of the command, without the notes."""
        return self.output.removesuffix(self.notes)

    def shown(self, max_chars: int) -> str:
        """Return the first `max_chars` of the command's output, and all notes."""
        cut = _CUT if len(self.command_output) > max_chars and _CUT not in self.notes else ""
        return self.command_output[:max_chars] + cut + self.notes


def require_sandbox() -> None:
    """Raise ValueError, with what to do, if the sandbox cannot run here: there is no other way to run a command.

    Also raise it if the sandbox would show this package, because a policy must not read the code of its tasks.
    """
    programs = {"bwrap": "bubblewrap", "/usr/bin/python3": "python3", "unshare": "util-linux", "setpriv": "util-linux"}
    for program, package in programs.items():
        if shutil.which(program) is None:
            raise ValueError(
                f"this environment runs commands in a sandbox, and {program} is missing: install {package} "
                f"(Debian, Ubuntu: apt-get install {package}); commands never run outside a sandbox"
            )
    seccomp.program()
    cgroup.parent()
    _limits_waiting()
    own = Path(__file__).resolve().parent
    if own.is_relative_to("/usr") and not any(own.is_relative_to(path) for path in HIDDEN):
        raise ValueError(
            f"this environment runs commands in a sandbox that shows /usr, and Slipstream is installed in it ({own}): "
            "install it elsewhere, in a virtual environment or in /usr/local"
        )


async def run_in_sandbox(
    command: str,
    tree: Tree,
    *,
    limits: Limits,
    mounts: Mapping[Path, str] | None = None,
    place: Place = Place.HOME,
    processes: Sequence[str] = (),
    base: Path | None = None,
) -> Finished:
    """Run `command` in bash at `place`, which contains `tree`; `mounts` adds further folders, read only.

    With a `base`, `tree` is a layer over that folder, and so is the resulting tree.
    `processes` are the names of idle processes that run beside the command, which may end them; "" is an ended one.

    A run that exceeds its limits is ended, with a note in its output. Raises EnvError if the sandbox does not start.
    """
    names = " ".join(name or "-" for name in processes)
    reserved_s = min(2 * END_S, RESERVED * left_s())
    wall_s = max(min(limits.wall_s, left_s() - reserved_s), 0.0)
    async with _bubblewrapped(_arguments(replace(limits, wall_s=wall_s), mounts or {}, place, base), limits) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        stdin = f"{names}\n{command}\0".encode() + pack(tree)
        exchange = asyncio.gather(_read(process.stderr, limits.output_bytes), _write(process.stdin, stdin))
        try:
            first = await _within(min(START_S, left_s()), process.stdout.read(1))
            if first is None:
                raise EnvError(f"the sandbox did not start within {START_S:g} s: this machine is too busy")
            last_s = min(wall_s + END_S, left_s() - reserved_s / 10)
            ended = await _within(last_s, _ended(process, process.stdout, exchange, limits))
        finally:
            exchange.cancel()
    if ended is None:
        if last_s < wall_s:
            raise EnvError(
                f"only {last_s:.1f} of {wall_s:g} s were left when the sandbox had started: this machine is too busy"
            )
        note = "[killed: it ran out of time]"
        return Finished(exit_code=KILLED, output=note, tree=None, processes=tuple(processes), notes=note)
    packed, raw_output, exit_code = ended
    output = raw_output.decode(errors="replace").replace("\0", "")
    if first != _STARTED:
        raise EnvError(f"the sandbox did not start, exit code {exit_code}: {output[:500]}")
    flags, packed = packed[: len(processes)], packed[len(processes) :]
    live = tuple(processes)
    if len(flags) == len(processes):
        live = tuple(name if flag == ord("1") else "" for name, flag in zip(processes, flags, strict=True))
    left: Tree | None = None
    notes = ""
    try:
        left = unpack(packed)
        require_room(left, limits=limits)
    except TreeError as error:
        left, notes = None, f"\n[the files cannot be kept: {error}]"
    notes += _CUT if len(raw_output) == limits.output_bytes else ""
    notes += f"\n[killed: more than {wall_s:g} s or another limit]" if exit_code == KILLED else ""
    return Finished(exit_code=exit_code, output=output + notes, tree=left, processes=live, notes=notes)


async def _ended(
    process: Process, tar: StreamReader, exchange: "asyncio.Future[tuple[bytes, None]]", limits: Limits
) -> tuple[bytes, bytes, int]:
    """Wait for the end, and return the resulting tar, the output, and the exit code."""
    packed = await _read(tar, limits.kept_bytes)
    output, _ = await exchange
    return packed, output, await process.wait()


async def _within(seconds: float, awaitable: Awaitable[T]) -> T | None:
    """Return the result, or None if that takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError:
        return None


def require_room(tree: Tree, *, limits: Limits) -> None:
    """Raise TreeError if `tree` would not fit into another run: sparse files take more memory when unpacked."""
    needed = sum(-(-len(node.content) // PAGE_BYTES) * PAGE_BYTES for node in tree.values())
    if needed > limits.tree_bytes:
        raise TreeError(f"they take {needed} bytes, the limit is {limits.tree_bytes}")


@asynccontextmanager
async def _bubblewrapped(arguments: list[str], limits: Limits) -> AsyncIterator[Process]:
    """Yield bubblewrap with the driver in it, and leave no process on exit, also when cancelled during the start.

    If bubblewrap is killed early, before its child is set to end with it, the child waits forever. So this kills the
    whole process group, and lets a start finish first: asyncio would kill only the one process that it knows.
    """
    memory_bytes = limits.memory_bytes + 3 * (limits.tree_bytes + SPARE_BYTES) + SHM_BYTES  # a run has up to 3 tmpfs
    async with cgroup.limited(memory_bytes=memory_bytes, max_pids=limits.max_processes + NUM_OWN_PIDS) as own_cgroup:
        starting = asyncio.create_task(_start(arguments, own_cgroup, limits))
        try:
            yield await asyncio.shield(starting)
        finally:
            await _end(await starting)


async def _start(arguments: list[str], own_cgroup: Path | None, limits: Limits) -> Process:
    """Start bubblewrap. With a cgroup, a shell waits until it is in the cgroup, and then becomes bubblewrap."""
    with seccomp.readable(None if _limits_waiting() else limits.max_waiting) as refused:
        process = await asyncio.create_subprocess_exec(
            *(cgroup.GATE if own_cgroup is not None else ()),
            *_unprivileged(),
            *arguments,
            *("--seccomp", str(refused), "/bin/bash", "--noprofile", "--norc", "-c", DRIVER, "driver", _LAYER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            cwd="/",
            process_group=0,
            pass_fds=[refused],
        )
    if own_cgroup is not None:
        assert process.stdin is not None
        try:
            cgroup.enter(own_cgroup, process.pid)
        except OSError as error:
            await _end(process)
            raise EnvError(f"could not move the sandbox into its cgroup {own_cgroup}: {error}") from error
        process.stdin.write(b"\n")
    return process


async def _end(process: Process) -> None:
    """Kill the process group, and wait until its pipes are closed."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.stdin.close()
    await asyncio.gather(
        _read(process.stdout, 0),
        _read(process.stderr, 0),
        process.stdin.wait_closed(),
        process.wait(),
        return_exceptions=True,  # a broken pipe is closed too
    )


def _arguments(limits: Limits, mounts: Mapping[Path, str], place: Place, base: Path | None) -> list[str]:
    """Return bubblewrap's command line, without the driver."""
    is_root = place is Place.ROOT
    of_the_host = _shown_of_usr() if is_root else []
    hidden = [path for path in HIDDEN if Path(path).is_dir() and not Path(path).is_symlink()]
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin" if is_root else "/usr/bin:/bin",
        "HOME": "/root" if is_root else HOME,
        "TREE": place.value,
        "BASE": "" if base is None else _BASE,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "MAX_PROCESSES": str(limits.max_processes),
        "MAX_OPEN_FILES": str(limits.max_open_files),
        "MEMORY_KIB": str(limits.memory_bytes >> 10),
        "CPU_S": str(limits.cpu_s),
        "FILE_KIB": str(limits.file_bytes >> 10),
        "WALL_S": f"{limits.wall_s:g}",
        "NOT_OF_THE_TREE": " ".join(f"--exclude=.{path}" for path in (*_BESIDE_A_ROOT, *of_the_host) if is_root),
    }
    user, size = "0" if is_root else "1000", limits.tree_bytes + SPARE_BYTES
    sizes = {"shm": SHM_BYTES} | dict.fromkeys(("root",) if is_root else ("home", "tmp", "testbed"), size)
    backlog = str(limits.max_waiting) if _limits_waiting() else ""
    arguments = [*_NAMESPACES, "/usr/bin/python3", "-I", "-S", "-c", SETUP, backlog]
    arguments += [" ".join(f"{name}={size}" for name, size in sizes.items()), "bwrap", "--unshare-all", "--share-net"]
    arguments += ["--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
    arguments += ["--as-pid-1", *(["--disable-userns"] if _disables_userns(shutil.which("bwrap")) else [])]
    arguments += ["--uid", user, "--gid", user, "--cap-drop", "ALL", "--hostname", "sandbox"]
    if is_root:
        arguments += ["--bind", "/sys/root", "/"]
        for path in of_the_host:
            arguments += ["--ro-bind", path, path]
    else:
        arguments += ["--ro-bind", "/usr", "/usr"]
        for path in hidden:
            arguments += ["--tmpfs", path]
    arguments += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    for name in ("bin", "lib", "lib64", *(("sbin",) if is_root else ())):
        arguments += ["--symlink", f"usr/{name}", f"/{name}"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--bind", "/sys/shm", "/dev/shm"]
    arguments += ["--dev-bind", "/dev/full", "/dev/zero"]  # the same zeros, but it cannot be mapped as shared memory
    if not is_root:
        arguments += ["--bind", "/sys/tmp", "/tmp", "--bind", "/sys/home", HOME]
    if place is Place.TESTBED:
        arguments += ["--bind", "/sys/testbed", place.value]
    for source, inside in (*mounts.items(), *([(base, _BASE)] if base is not None else [])):
        arguments += ["--ro-bind", str(source), inside]
    # The folders that bubblewrap made itself are in memory and have no size limit, so they become read only.
    read_only = ("/dev",) if is_root else (*hidden, "/dev", "/")
    for path in read_only:
        arguments += ["--remount-ro", path]
    arguments += ["--chdir", place.value]
    for name, value in environment.items():
        arguments += ["--setenv", name, value]
    return arguments


@functools.cache
def _disables_userns(bwrap: str | None) -> bool:
    """Whether bubblewrap can forbid further user namespaces here; the filter of system calls always does.

    It needs version 0.8.0, and cannot in a container in which /proc/sys is read only.
    """
    return _succeeds(bwrap or "bwrap", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "/bin/true")


@functools.cache
def _limits_waiting() -> bool:
    """Whether a sandbox may set the kernel's limit of connections that wait; else the filter refuses longer queues.

    Linux 6.6 does not let it, 6.18 does unless /proc/sys is read only.
    """
    may = _succeeds(*_NAMESPACES, "/bin/sh", "-c", f"echo 1 > {_SOMAXCONN}")
    if not may:
        log.warning(
            "a sandbox cannot set %s on this host: a program that listens with a longer queue than it may have is "
            "refused (docs/sandbox.md)",
            _SOMAXCONN,
        )
    return may


def _succeeds(*command: str) -> bool:
    return subprocess.run((*_unprivileged(), *command), capture_output=True, check=False, cwd="/").returncode == 0


def _shown_of_usr() -> list[str]:
    """Return the folders of /usr to mount one by one, so that /usr itself can be written. Skips links out of /usr."""
    folders = [path for path in Path("/usr").iterdir() if path.is_dir() and path.resolve().is_relative_to("/usr")]
    return sorted(str(path) for path in folders if not {str(path), str(path.resolve())} & set(HIDDEN))


def _unprivileged() -> tuple[str, ...]:
    """What runs a command as another user if this is root, the number of whose processes the kernel does not limit.

    Not by `subprocess`, which would fork this process for it: the more memory it has, the longer that takes.
    """
    user = str(UNPRIVILEGED_ID)
    return ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups") if os.geteuid() == 0 else ()


async def _read(stream: StreamReader, max_bytes: int) -> bytes:
    """Return the first `max_bytes`, and discard the rest so that the writer does not block."""
    kept = bytearray()
    while chunk := await stream.read(1 << 16):
        kept += chunk[: max_bytes - len(kept)]
    return bytes(kept)


async def _write(stream: StreamWriter, content: bytes) -> None:
    try:
        stream.write(content)
        await stream.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the sandbox ended early; its exit code is reported
    finally:
        stream.close()
