"""A program that is a fork is like one that was started from nothing, and dies like one."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from slipstream.common.process.shutdown import die_with_parent
from tests import preload
from tests.processes import customized
from tests.waiting import wait_until

BEYOND = "redis://127.0.0.1:1"  # no server answers there: the learner asks again for a while, then ends with code 2
COMMAND = [sys.executable, "-m", "slipstream.tools.cli.cli", "learner", "run.name=forked", f"redis.url={BEYOND}"]


@pytest.fixture(autouse=True)
def forks() -> None:
    if os.environ.get("SLIPSTREAM_TEST_FORKS") == "0" or sys.platform != "linux":
        pytest.skip("no program is a fork")


def start(tmp_path: Path, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, f"run.root={tmp_path}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | environment,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
        text=True,
    )


def is_fork(pid: int) -> bool:
    """Whether a process that has just been started is a fork: then it has torch already."""
    return "torch" in Path(f"/proc/{pid}/maps").read_text()


def test_it_shows_its_own_command_environment_session_and_parent(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('first', *sys.orig_argv[2:4])")
    with start(tmp_path, COLOUR="blue", **customized(tmp_path)) as process:
        shown = psutil.Process(process.pid)
        assert is_fork(process.pid)
        assert [word for word in shown.cmdline() if word] == [*COMMAND, f"run.root={tmp_path}"]
        assert shown.environ()["COLOUR"] == "blue" and "ROOM" not in shown.environ()
        assert shown.ppid() == os.getpid() and os.getsid(process.pid) == process.pid
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and f"`redis.url` {BEYOND} does not answer" in said
    assert said.startswith("first slipstream.tools.cli.cli learner\n")


def test_it_is_killed_as_any_process(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        offspring = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
    gone, alive = psutil.wait_procs(offspring, timeout=30)
    assert len(gone) == 1 and not alive  # what would have forked for it


@pytest.mark.parametrize(
    ("file", "environment", "forks"),
    [("mine.py", {}, True), ("redis.py", {}, False), ("mine.py", {"TORCH_LOGS": "recompiles"}, False)],
)
def test_a_program_that_would_import_otherwise_is_no_fork(
    tmp_path: Path, file: str, environment: dict[str, str], forks: bool
) -> None:
    (tmp_path / file).touch()
    with start(tmp_path, **customized(tmp_path), **environment) as process:
        assert is_fork(process.pid) is forks
        process.kill()


def test_it_ends_when_its_parent_does(tmp_path: Path) -> None:
    parent = f"""
import subprocess, os
from functools import partial
from slipstream.common.process.shutdown import die_with_parent
from tests import preload
from tests.preload import start_by_forks
start_by_forks()
process = subprocess.Popen({[*COMMAND, f"run.root={tmp_path}"]!r}, preexec_fn=partial(die_with_parent, os.getpid()))
print(process.pid, flush=True)
process.wait()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        orphan = psutil.Process(int(process.stdout.readline()))
        assert is_fork(orphan.pid)
        process.kill()
    wait_until(lambda: has_ended(orphan), "it ends", timeout_s=30)


def test_a_worker_of_xdist_is_a_fork_of_a_process_that_has_collected_the_tests() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("this process is no worker")
    assert "ROOM" in preload._environment, "an image imported it"


def has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True
