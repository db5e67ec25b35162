"""The cgroup of a sandboxed run: what is written to it, in a folder that stands for one, and in a real one."""

import asyncio
import contextlib
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation import cgroup
from slipstream.envhub.isolation.sandbox import Limits, run_in_sandbox

HYBRID = "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw,nsdelegate 0 0\n"
UNIFIED = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the sandbox takes for a writable cgroup. Its files are not removed with it, as a cgroup's are."""
    monkeypatch.setattr(cgroup, "parent", lambda: tmp_path)
    monkeypatch.setattr(cgroup, "REMOVE_S", 0.0)
    return tmp_path


@pytest.fixture
def real() -> Iterator[Path]:
    """A new cgroup without limits, below the one of this process."""
    found = cgroup.candidates(mounts=Path("/proc/self/mounts").read_text(), own=Path("/proc/self/cgroup").read_text())
    for path in found:
        with contextlib.suppress(OSError):
            made = path / "slipstream-test"
            made.mkdir()
            break
    else:
        pytest.skip("no cgroup v2 is writable here")
    yield made
    if made.exists():
        made.rmdir()


def test_candidates_are_the_own_cgroup_and_the_one_above_it() -> None:
    service, path = "/system.slice/slipstream.service", "/sys/fs/cgroup/system.slice/slipstream.service"
    assert cgroup.candidates(mounts=UNIFIED, own=f"0::{service}/main\n") == [Path(f"{path}/main"), Path(path)]
    assert cgroup.candidates(mounts=UNIFIED, own="0::/\n") == [Path("/sys/fs/cgroup")]
    assert cgroup.candidates(mounts=HYBRID, own="4:memory:/a\n0::/\n") == [Path("/sys/fs/cgroup/unified")]
    assert cgroup.candidates(mounts=HYBRID, own="4:memory:/a\n") == []
    assert cgroup.candidates(mounts="proc /proc proc rw 0 0\n", own="0::/\n") == []


def test_a_run_is_put_into_its_cgroup_with_its_limits_before_it_starts(folder: Path) -> None:
    limits = Limits(memory_bytes=1 << 29, max_processes=32, tree_bytes=8 << 20)
    finished = asyncio.run(run_in_sandbox("echo hello", {}, limits=limits))
    assert (finished.exit_code, finished.output) == (0, "hello\n")
    (made,) = folder.glob("slipstream-*")
    written = {path.name: path.read_text() for path in made.iterdir()}
    pid = written.pop("cgroup.procs")
    assert pid.isdigit() and not Path("/proc", pid).exists()
    memory = str((1 << 29) + 3 * (9 << 20) + (1 << 20))
    assert written == {"memory.max": memory, "memory.swap.max": "0", "pids.max": "36", "cgroup.kill": "1"}


def test_a_cgroup_that_cannot_be_made_is_a_failure_of_the_environment(folder: Path) -> None:
    folder.rmdir()
    with pytest.raises(EnvError, match="could not make a cgroup for the sandbox"):
        asyncio.run(run_in_sandbox("true", {}, limits=Limits()))


def test_a_folder_without_the_controllers_is_not_usable(tmp_path: Path) -> None:
    assert not cgroup.is_usable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_real_cgroup_is_removed_with_all_its_processes(real: Path) -> None:
    process = subprocess.Popen(["/bin/sh", "-c", "read -r _; sleep 60 & sleep 60"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    cgroup.enter(real, process.pid)
    process.stdin.write(b"\n")
    process.stdin.close()
    while len((real / "cgroup.procs").read_text().split()) < 3:
        assert process.poll() is None
    asyncio.run(cgroup.remove(real))
    assert not real.exists()
    assert process.wait() == -9


def test_a_run_in_a_real_cgroup_leaves_neither_it_nor_a_process(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "parent", lambda: real.parent)
    monkeypatch.setattr(cgroup, "create", lambda folder, **limits: real)
    finished = asyncio.run(run_in_sandbox("sleep 60 & setsid sleep 60 & echo hello", {}, limits=Limits()))
    assert finished.output == "hello\n"
    assert not real.exists()


HUNGRY = """
import os, time
children = []
for _ in range(4):
    children.append(os.fork())
    if children[-1] == 0:
        memory = bytearray(80 << 20)
        time.sleep(3)
        os._exit(0)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(0 < codes.count(-9) < 4)
"""


@pytest.mark.skipif(cgroup.parent() is None, reason="no cgroup v2 with memory and pids is writable here")
def test_the_memory_of_all_processes_of_a_run_is_limited_in_a_real_cgroup() -> None:
    limits = Limits(memory_bytes=1 << 27, tree_bytes=1 << 20)
    finished = asyncio.run(run_in_sandbox(f"python3 -c {shlex.quote(HUNGRY)}", {}, limits=limits))
    assert finished.output == "True\n"
    parent = cgroup.parent()
    assert parent is not None and not list(parent.glob("slipstream-*"))
