"""The state of a run: what its process writes as it begins and ends, and what is left of one that was killed."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import Standing, standing, training

STARTS = """
import sys, time
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import training

def verb():
    print("begun", flush=True)
    time.sleep(600)

training(RunDir(sys.argv[1], "run"), verb)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path, "run")
    made.create()
    return made


def record(run_dir: RunDir, step: int) -> None:
    with run_dir.metrics.open("a") as file:
        file.write(json.dumps({"step": step, "time": time.time()}) + "\n")


def test_a_run_starts_until_it_records_something_and_then_runs(run_dir: RunDir) -> None:
    assert standing(run_dir) is Standing.STOPPED, "no process has trained it"
    record(run_dir, 1)  # of an earlier sitting
    seen = []

    def verb() -> int:
        seen.append(standing(run_dir))
        record(run_dir, 2)
        seen.append(standing(run_dir))
        return 0

    assert training(run_dir, verb) == 0
    assert [*seen, standing(run_dir)] == [Standing.STARTING, Standing.RUNNING, Standing.FINISHED]


def test_the_exit_code_says_how_a_run_ended_and_an_error_is_a_failure(run_dir: RunDir) -> None:
    for code, end in ((0, "FINISHED"), (1, "FAILED"), (75, "STOPPED"), (2, "FAILED"), (130, "STOPPED")):
        assert training(run_dir, lambda code=code: code) == code
        assert standing(run_dir) is Standing[end], code
    with pytest.raises(ZeroDivisionError):
        training(run_dir, lambda: 1 // 0)
    assert standing(run_dir) is Standing.FAILED


def test_a_run_whose_process_was_killed_is_stopped(run_dir: RunDir) -> None:
    process = subprocess.Popen([sys.executable, "-c", STARTS, str(run_dir.path.parent)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    assert standing(run_dir) is Standing.STARTING
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert standing(run_dir) is Standing.STOPPED


def test_a_process_that_was_followed_by_another_does_not_write_its_end(run_dir: RunDir) -> None:
    def former() -> int:
        assert training(run_dir, lambda: 0) == 0
        return 1

    assert training(run_dir, former) == 1
    assert standing(run_dir) is Standing.FINISHED


def test_ranks_other_than_the_first_write_nothing(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert training(run_dir, lambda: 0) == 0
    assert not run_dir.state.exists()


@pytest.mark.parametrize("content", [b"", b"starting", b"starting x", b"\xff"])
def test_a_damaged_state_counts_as_stopped(run_dir: RunDir, content: bytes) -> None:
    run_dir.state.write_bytes(content)
    assert standing(run_dir) is Standing.STOPPED
    run_dir.state.unlink()
    run_dir.state.mkdir()
    assert standing(run_dir) is Standing.STOPPED


def test_a_state_without_its_time_counts_as_stopped_while_its_process_lives(run_dir: RunDir) -> None:
    record(run_dir, 1)
    with run_dir.state.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("starting x")
        file.flush()
        assert standing(run_dir) is Standing.STOPPED
