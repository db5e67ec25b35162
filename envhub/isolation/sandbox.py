"""Commands that nobody vouches for, run by bubblewrap: no network, no files, no secrets and no processes of the host.

A run is a function of a file tree: the tree goes in, a command runs on it, and what the command said and the tree as
it left it come out. Nothing stays behind, and nothing of the tree is ever written to the host's disk. Whether an
episode is solved is judged outside, by what came out.

What is inside: /usr (without what of it is `HIDDEN`) and the links in /etc/alternatives, read only; a home of limited
size with the tree, and a /tmp of limited size, or instead of both a root directory (`Place`). The tree may be a layer
over a folder of the host's that is too large to go in and out each time (`envhub/layer.py`). Limits: see `Limits`.
Memory is limited per process, as cgroups are not to be had everywhere: a run can take `max_processes` times
`memory_bytes` at most.
"""

import asyncio
import os
import shutil
import signal
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from envhub.isolation import layer
from envhub.env import EnvError
from envhub.isolation.file_tree import Tree, TreeError, pack, unpack

HOME = "/home/agent"
HIDDEN = ("/usr/local", "/usr/src")  # of /usr: what a host has put there itself, and no package
MAX_COMMAND_CHARS = 20_000
GRACE_S = 20.0  # beyond the command's own time: to start, to unpack and to pack, on a machine that is busy
NOBODY = 65534

_STARTED = b"+"
_CUT = "\n[cut]"
PAGE_BYTES = 4096  # what a file in memory takes is a whole number of these
SPARE_BYTES = 1 << 20  # of memory beyond `tree_bytes`, for what is laid beside a tree that takes all of them
_BASE = "/opt/base"
_LAYER = Path(layer.__file__).read_text()
_BESIDE_A_ROOT = ("/proc", "/dev", "/bin", "/lib", "/lib64", "/sbin", "/etc/alternatives")
# The command's own output, both streams of it, goes to the driver's stderr; stdout carries the tree. When the command
# is over, everything that it left running is killed before the tree is read. A root without capabilities needs modes
# that let it read, and write into folders, where a real one would not.
# Processes that are to run beside it are sleeps of another name, each started when the one before it has its name, so
# that their numbers are the same in every run; an ended one leaves its number unused. One that neither sleeps nor is
# stopped, or that has a signal to take, is about to die, and is looked at again. Names and command come by stdin: a
# command that ends what bears a name ends nothing of the sandbox's own.
_DRIVER = """
lives() {
    while status=$(cat "/proc/$1/status") && [[ $status =~ State:[[:space:]]+([A-Z]) ]]; do
        case ${BASH_REMATCH[1]} in
            Z | X) return 1 ;;
            T) return 0 ;;
            S) [[ $status =~ (SigPnd|ShdPnd):[[:space:]]*0*[1-9a-f] ]] || return 0 ;;
        esac
    done
    return 1
}
umask 022
ulimit -c 0 -u "$MAX_PROCESSES" -v "$MEMORY_KIB" -t "$CPU_S" -f "$FILE_KIB" || exit
read -r -a processes; read -r -d "" command
tar -x -f - -C "$TREE" || exit
[ -z "$BASE" ] || /usr/bin/python3 -I -S -c "$1" lay "$BASE" "$TREE" || exit
printf +
exec 3>&2 2>/dev/null
beside=()
for name in "${processes[@]}"; do
    if [ "$name" != - ]; then
        (exec -a "$name" sleep infinity </dev/null >/dev/null 3>&-) &
        until read -r comm < "/proc/$!/comm" && [ "$comm" = sleep ]; do :; done
    else
        (exit) & wait $!
    fi
    beside+=($!)
done
timeout --signal=KILL "$WALL_S" /bin/bash --noprofile --norc -c "$command" </dev/null >&3 2>&3 3>&-
rc=$?
for pid in "${beside[@]}"; do lives "$pid" && printf 1 || printf 0; done
kill -9 -1 2>/dev/null
cd "$TREE" && if [ "$TREE" = / ] || [ -n "$BASE" ]; then
    find . -xdev \\( -type d ! -perm -u+rwx -o -type f ! -perm -u+r \\) -exec chmod u+rwX {} \\; 2>/dev/null
else
    chmod -R u+rX . 2>/dev/null
fi
[ -z "$BASE" ] || /usr/bin/python3 -I -S -c "$1" peel "$BASE" . 2>/dev/null || exit "$rc"
tar -c $NOT_OF_THE_TREE --hard-dereference --format=ustar --sort=name \\
    --mtime=@0 --owner=0 --group=0 --numeric-owner -f - . 2>/dev/null
exit "$rc"
"""


class Place(Enum):
    """Where the tree of a run lies."""

    HOME = HOME  # in the home of a user; nothing else but /tmp can be written
    # In / itself, whose user is called root: all of it can be written but what the host's /usr brings. That root has no
    # capability and is nobody outside, as the user of the home is: no other users, no packages, no mounts.
    ROOT = "/"
    # In a folder where SWE-bench's own images have the repository, beside the home, which is empty.
    TESTBED = "/testbed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one run may take."""

    wall_s: float = 10.0
    cpu_s: int = 5  # of each process
    memory_bytes: int = 1 << 29  # of address space, of each process
    max_processes: int = 32
    file_bytes: int = 4 << 20  # of each file
    tree_bytes: int = 8 << 20  # of the home, and as much of /tmp and of a testbed; or of the root directory
    kept_bytes: int = 32 << 20  # of the tar in which the tree comes out
    output_bytes: int = 16_000  # of what is said; the rest is cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """What came of a run."""

    exit_code: int  # 137: killed at a limit
    output: str  # the `notes` are its end
    tree: Tree | None  # None where the command left more than can be taken out
    processes: tuple[str, ...] = ()  # those that ran beside it and still do; "" for one that has ended
    notes: str = ""  # what the sandbox has to say of the run

    @property
    def said(self) -> str:
        """What the command itself said."""
        return self.output.removesuffix(self.notes)

    def shown(self, max_chars: int) -> str:
        """The beginning of what the command said, and the notes, which stand behind whatever is cut off."""
        cut = _CUT if len(self.said) > max_chars and _CUT not in self.notes else ""
        return self.said[:max_chars] + cut + self.notes


def require_sandbox() -> None:
    """Raise ValueError, with what to do, where a sandbox cannot be had: there is no other way to run a command.

    None can be had where the sandbox would show this package: what it says of a task is not for a policy to read.
    """
    for program, package in (("bwrap", "bubblewrap"), ("/usr/bin/python3", "python3")):
        if shutil.which(program) is None:
            raise ValueError(
                f"this environment runs commands in a sandbox, and {program} is missing: install {package} "
                f"(Debian, Ubuntu: apt-get install {package}); it never runs them without"
            )
    own = Path(__file__).resolve().parent
    if own.is_relative_to("/usr") and not any(own.is_relative_to(path) for path in HIDDEN):
        raise ValueError(
            f"this environment runs commands in a sandbox that shows /usr, and {own} lies there: install Slipstream "
            "elsewhere, in a virtual environment or in /usr/local"
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
    """Run bash's `command` at the `place` that `tree` fills; `mounts` shows further folders, read only, inside.

    With a `base`, `tree` is a layer over that folder, and so is the tree that comes out.
    `processes` are the names of processes that do nothing beside it, until it ends them; "" is one that has ended.

    A run that exceeds its limits is cut and says so; EnvError where the sandbox itself does not start.
    """
    names = " ".join(name or "-" for name in processes)
    async with _bubblewrapped(_arguments(limits, mounts or {}, place, base)) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            async with asyncio.timeout(limits.wall_s + GRACE_S):
                packed, said, _ = await asyncio.gather(
                    _read(process.stdout, limits.kept_bytes),
                    _read(process.stderr, limits.output_bytes),
                    _write(process.stdin, f"{names}\n{command}\0".encode() + pack(tree)),
                )
                exit_code = await process.wait()
        except TimeoutError:
            note = "[killed: it outlived its time]"
            return Finished(exit_code=137, output=note, tree=None, processes=tuple(processes), notes=note)
    output = said.decode(errors="replace").replace("\0", "")
    if not packed.startswith(_STARTED):
        raise EnvError(f"the sandbox does not start, exit code {exit_code}: {output[:500]}")
    flags, packed = packed[1 : 1 + len(processes)], packed[1 + len(processes) :]
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
    notes += _CUT if len(said) == limits.output_bytes else ""
    notes += f"\n[killed: more than {limits.wall_s:g} s or another limit]" if exit_code == 137 else ""
    return Finished(exit_code=exit_code, output=output + notes, tree=left, processes=live, notes=notes)


def require_room(tree: Tree, *, limits: Limits) -> None:
    """Raise TreeError where `tree` would not go into another run: files with holes in them take more than before."""
    needed = sum(-(-len(node.content) // PAGE_BYTES) * PAGE_BYTES for node in tree.values())
    if needed > limits.tree_bytes:
        raise TreeError(f"they take {needed} bytes, the limit is {limits.tree_bytes}")


@asynccontextmanager
async def _bubblewrapped(arguments: list[str]) -> AsyncIterator[Process]:
    """Bubblewrap with the driver in it, of which nothing is left in the end, however early that comes.

    A bubblewrap that is killed before it has tied its child's life to its own leaves a child that waits for ever. So
    the whole group is killed, and a start is not cut short: asyncio would kill the one process that it knows.
    """
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *arguments,
            *("/bin/bash", "--noprofile", "--norc", "-c", _DRIVER, "driver", _LAYER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            cwd="/",
            process_group=0,
            **_unprivileged(),
        )
    )
    try:
        yield await asyncio.shield(starting)
    finally:
        await _end(await starting)


async def _end(process: Process) -> None:
    """Kill what still runs, and wait until its pipes are closed."""
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
        return_exceptions=True,  # a pipe that broke is closed too
    )


def _arguments(limits: Limits, mounts: Mapping[Path, str], place: Place, base: Path | None) -> list[str]:
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
        "MEMORY_KIB": str(limits.memory_bytes >> 10),
        "CPU_S": str(limits.cpu_s),
        "FILE_KIB": str(limits.file_bytes >> 10),
        "WALL_S": f"{limits.wall_s:g}",
        "NOT_OF_THE_TREE": " ".join(f"--exclude=.{path}" for path in (*_BESIDE_A_ROOT, *of_the_host) if is_root),
    }
    user, size = "0" if is_root else "1000", str(limits.tree_bytes + SPARE_BYTES)
    arguments = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
    arguments += ["--uid", user, "--gid", user, "--cap-drop", "ALL", "--hostname", "sandbox"]
    if is_root:
        arguments += ["--size", size, "--tmpfs", "/"]
        for path in of_the_host:
            arguments += ["--ro-bind", path, path]
    else:
        arguments += ["--ro-bind", "/usr", "/usr"]
        for path in hidden:
            arguments += ["--tmpfs", path]
    arguments += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    for name in ("bin", "lib", "lib64", *(("sbin",) if is_root else ())):
        arguments += ["--symlink", f"usr/{name}", f"/{name}"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--size", "1048576", "--tmpfs", "/dev/shm"]
    if not is_root:
        arguments += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", HOME]
    if place is Place.TESTBED:
        arguments += ["--size", size, "--tmpfs", place.value]
    for source, inside in (*mounts.items(), *([(base, _BASE)] if base is not None else [])):
        arguments += ["--ro-bind", str(source), inside]
    # What bubblewrap made itself is memory without a limit until it is read only.
    read_only = ("/dev",) if is_root else (*hidden, "/dev", "/")
    for path in read_only:
        arguments += ["--remount-ro", path]
    arguments += ["--chdir", place.value]
    for name, value in environment.items():
        arguments += ["--setenv", name, value]
    return arguments


def _shown_of_usr() -> list[str]:
    """The folders of /usr, one by one: what lies beside them can then be written. No link that leads out of /usr."""
    folders = [path for path in Path("/usr").iterdir() if path.is_dir() and path.resolve().is_relative_to("/usr")]
    return sorted(str(path) for path in folders if not {str(path), str(path.resolve())} & set(HIDDEN))


def _unprivileged() -> dict[str, Any]:
    """Root becomes nobody before anything starts: the kernel does not limit root's number of processes."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


async def _read(stream: StreamReader, max_bytes: int) -> bytes:
    """The first `max_bytes`, and the rest to nowhere, so that the writer does not wait."""
    kept = bytearray()
    while chunk := await stream.read(1 << 16):
        kept += chunk[: max_bytes - len(kept)]
    return bytes(kept)


async def _write(stream: StreamWriter, content: bytes) -> None:
    try:
        stream.write(content)
        await stream.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it died early; its exit code says of what
    finally:
        stream.close()
