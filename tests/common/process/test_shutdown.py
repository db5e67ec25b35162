"""The flag that signals set, at every moment at which one may come."""

import subprocess
import sys
import threading
import time

import pytest

from slipstream.common.process.shutdown import MAX_WAIT_S, Flag

DEADLINE_S = 120.0

# Waits again and again, each time with a signal before a later line of what `wait` runs, until no line is left.
SIGNALLED = """
import signal, sys
from types import FrameType
from slipstream.common.process.shutdown import Shutdown

def wait_with_a_signal(at: int) -> bool:
    num_lines = 0

    def trace(frame: FrameType, event: str, _: object):
        nonlocal num_lines
        if event == "line" and frame.f_code.co_name != "_handle":
            num_lines += 1
            if num_lines == at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGTERM)
        return trace

    shutdown = Shutdown()
    sys.settrace(trace)
    shutdown.requested.wait(0.01)
    sys.settrace(None)
    assert shutdown.requested.is_set() == (num_lines >= at)
    assert shutdown.requested.wait(0) == shutdown.requested.is_set()
    return num_lines >= at

at = 1
while wait_with_a_signal(at):
    at += 1
print(at - 1)
"""


def test_a_signal_at_any_line_of_a_wait_sets_the_flag() -> None:
    found = subprocess.run([sys.executable, "-c", SIGNALLED], timeout=DEADLINE_S, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 20  # lines of `Flag.wait` and `Condition.wait`


def test_whoever_waits_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    # so that nothing but `set` can end the wait
    monkeypatch.setattr("slipstream.common.process.shutdown.MAX_WAIT_S", DEADLINE_S)
    flag, woken = Flag(), list[bool]()
    waiting = [threading.Thread(target=lambda: woken.append(flag.wait())) for _ in range(3)]
    for thread in waiting:
        thread.start()
    flag.set()
    for thread in waiting:
        thread.join(DEADLINE_S / 2)
    assert woken == [True] * 3


def test_a_wait_ends_after_its_time() -> None:
    flag, started = Flag(), time.monotonic()
    assert not flag.wait(2 * MAX_WAIT_S)
    assert time.monotonic() - started >= 2 * MAX_WAIT_S
    assert not flag.wait(0) and not flag.is_set()
