"""How supervised processes start, fail, start again and end, and that none of them outlives its supervisor."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.tools.run import child as child_module
from slipstream.tools.run.child import Child
from tests.waiting import DEADLINE_S, wait_until

SUPERVISOR = """
import sys, time
from pathlib import Path
from slipstream.tools.run.child import Child

child = Child("sleeper", ["sleep", "1000"], log=Path(sys.argv[1]), environment={})
child.start()
print(child._process.pid, flush=True)
time.sleep(1000)
"""

STARTING = """
import time
from slipstream.common.process.shutdown import Shutdown

with Shutdown().nothing_to_lose():
    print("ready", flush=True)
    time.sleep(1000)
"""

WORKING = """
import sys, time
from slipstream.common.process.shutdown import Shutdown

shutdown = Shutdown(at_once=lambda: print("insisted", flush=True))
print("ready", flush=True)
shutdown.requested.wait()
print("asked", flush=True)
time.sleep(1000)
"""

HANGING = """
import time
from slipstream.common.process.shutdown import Shutdown

shutdown = Shutdown()
shutdown.end_within(0.5)
time.sleep(1.0)
print("ready", flush=True)
while True:
    time.sleep(1000)
"""


def started(tmp_path: Path, script: str) -> Child:
    child = Child("child", ["sh", "-c", script], log=tmp_path / "logs" / "child.log", environment={"GREETING": "hello"})
    child.start()
    return child


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's counts, of three processes that it has killed; crashed children are restarted at once."""
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free_pages 100\noom_kill 3\n")
    monkeypatch.setattr(child_module, "COUNTS", counts)
    monkeypatch.setattr(child_module, "BACK_OFF_S", (0.0,) * 5)
    return counts


def ended(tmp_path: Path, script: str) -> Child:
    child = started(tmp_path, script)
    child.wait(DEADLINE_S)
    return child


@contextmanager
def ready(program: str) -> Iterator[tuple["subprocess.Popen[str]", IO[str]]]:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process, process.stdout


def test_what_a_child_says_is_in_its_log_and_its_environment_is_its_own(tmp_path: Path) -> None:
    child = ended(tmp_path, "echo $GREETING; echo trouble >&2")
    assert child.exit_code == 0 and child.keep_up()
    assert child.last_log_lines() == "hello\ntrouble"


def test_new_lines_are_found_after_a_truncation_and_after_a_line_without_end_and_none_of_a_log_that_was_moved_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = ended(tmp_path, "echo restarting; echo rest")
    assert child.new_lines("restarting") == ["restarting"]
    monkeypatch.setattr(child_module, "MAX_READ_BYTES", 32)
    child.log.write_text("restarting\n")
    assert child.new_lines("restarting") == ["restarting"]
    child.log.write_text("restarting\n" + "\r50 %" * 32 + "\nrestarting again\n")
    assert [line for _ in range(9) for line in child.new_lines("restarting")] == ["restarting again"]
    assert child.last_log_lines().endswith("\nrestarting again")
    assert len(child.last_log_lines().encode()) <= child_module.MAX_READ_BYTES, "the rest of a log stays on its disk"
    child.log.rename(tmp_path / "kept.log")
    assert child.new_lines("restarting") == [] and child.last_log_lines() == ""


def test_a_child_that_crashes_is_started_again_some_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "MAX_RESTARTS", 2)
    monkeypatch.setattr(child_module, "BACK_OFF_S", (0.0, 0.0))
    child = started(tmp_path, "echo once more; exit 1")
    wait_until(lambda: not child.keep_up(), "its end to be seen")
    assert child.exit_code == 1
    assert child.last_log_lines() == "once more\nonce more\nonce more"


def test_a_child_that_was_killed_too_often_has_a_code_and_a_reason(
    tmp_path: Path, counts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = started(tmp_path, "kill -9 $$")
    wait_until(lambda: not child.keep_up(), "its end to be seen")
    counts.write_text("oom_kill 4\n")
    child_module.print_failure("up", child)
    assert child_module.failed_code(child) == 1
    said = "was killed by signal 9, Killed after 5 restarts; the kernel killed a process for lack of memory before"
    assert said in capsys.readouterr().err


def test_a_second_sigterm_ends_a_supervisor_at_once_and_changes_nothing_for_its_children() -> None:
    for program, code in ((WORKING, 143), (WORKING.replace('at_once=lambda: print("insisted", flush=True)', ""), None)):
        with ready(program) as (working, said):
            for _ in range(2):  # a scheduler may send it twice
                working.send_signal(signal.SIGTERM)
            assert said.readline() == "asked\n"
            time.sleep(1.5)
            assert working.poll() is None
            working.send_signal(signal.SIGTERM)
            time.sleep(0.0 if code else 0.5)
            assert (working.wait(DEADLINE_S) if code else working.poll()) == code
            working.kill()


def test_lack_of_memory_is_named_where_the_kernel_killed_for_it(
    tmp_path: Path, counts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = started(tmp_path, "kill -9 $$")
    wait_until(lambda: child.exit_code == -9, "its death")
    assert child.keep_up() and child.keep_up()  # it was killed by somebody else
    assert "FAULT" not in capsys.readouterr().out
    wait_until(lambda: child.exit_code == -9, "its death")
    counts.write_text("nr_free_pages 100\noom_kill 4\n")
    assert child.keep_up() and child.keep_up()
    assert "FAULT: the kernel killed a process for lack of memory before" in capsys.readouterr().out
    child.wait(DEADLINE_S)
    counts.unlink()
    assert child_module.killed_for_memory() == 0


def test_a_child_that_was_given_bad_input_is_not_started_again_and_says_why_on_one_line(tmp_path: Path) -> None:
    by_torchrun = "E1124 20:35:39.853 1 lib/torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2)"
    for after in ("", f"echo '{by_torchrun}'; "):
        child = ended(tmp_path, f"echo starting; echo the reason; {after}exit 2")
        assert not child.keep_up()
        assert child.last_log_lines() == "the reason"


def test_a_child_that_does_not_end_when_asked_is_killed_with_all_that_it_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = started(tmp_path, "trap '' TERM; setsid sleep 1000 & echo $!; wait; wait")
    wait_until(lambda: child.last_log_lines() != "", "its first words")
    grandchild = psutil.Process(int(child.last_log_lines()))
    child.ask_to_end()
    child.wait(0.2)
    assert capsys.readouterr().err == f"child did not end within 0.2 s, and is killed; see {child.log}\n"
    assert child.exit_code == -signal.SIGKILL
    wait_until(lambda: is_gone(grandchild), "its own child to be gone")


def test_a_child_that_starts_processes_without_a_pause_is_killed_with_all_of_them(tmp_path: Path) -> None:
    beat, script = tmp_path / "beat", tmp_path / "restless"
    (tmp_path / "go").touch()
    script.write_text(f'[ -e {tmp_path}/go ] || exit; : > {beat}; sh "$0" & wait')
    child = started(tmp_path, f"trap '' TERM; while :; do sh {script}; done")
    wait_until(beat.exists, "a beat")
    child.kill()
    beat.unlink()
    time.sleep(0.5)
    assert not beat.exists()
    (tmp_path / "go").unlink()


def test_a_child_of_any_program_ends_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "log")]
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    with supervisor.stdout:
        sleeper = psutil.Process(int(supervisor.stdout.readline()))
    assert not is_gone(sleeper)
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: is_gone(sleeper), "the sleeper to be gone")


def test_a_process_whose_parent_is_gone_already_ends_and_one_whose_parent_is_there_goes_on() -> None:
    """It is the launcher's pid that decides: a launcher in a container is process 1, as an orphan's new parent is."""
    command = "from slipstream.common.process.shutdown import die_with_parent; die_with_parent({}); print('continues')"
    orphan = subprocess.run([sys.executable, "-c", command.format(2**22 + 1)], capture_output=True, text=True)
    assert (orphan.returncode, orphan.stdout) == (EXIT_PREEMPTED, "")
    child = subprocess.run([sys.executable, "-c", command.format(os.getpid())], capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (0, "continues\n")


def test_the_first_signal_ends_a_process_that_has_nothing_to_lose() -> None:
    for number, exit_code in ((signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)):
        with ready(STARTING) as (starting, _):
            starting.send_signal(number)
            assert starting.wait(DEADLINE_S) == exit_code


def test_a_signal_asks_a_working_process_however_often_it_comes_and_ctrl_c_after_it_ends_it() -> None:
    with ready(WORKING) as (working, said):
        working.send_signal(signal.SIGUSR1)
        assert said.readline() == "asked\n"
        working.send_signal(signal.SIGTERM)
        working.send_signal(signal.SIGUSR1)
        with pytest.raises(subprocess.TimeoutExpired):
            working.wait(0.2)
        working.send_signal(signal.SIGINT)
        assert said.readline() == "insisted\n"
        assert working.wait(DEADLINE_S) == 130


def test_a_process_that_hangs_when_it_is_told_to_leave_ends_at_its_deadline_and_not_before_it_is_told() -> None:
    with ready(HANGING) as (hanging, _):
        told = time.monotonic()
        hanging.send_signal(signal.SIGTERM)
        assert hanging.wait(DEADLINE_S) == EXIT_PREEMPTED
        assert time.monotonic() - told >= 0.5


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
