"""The judge inside the sandbox: run the tests in child processes, and print a signed report of their results.

The system's Python runs it, with the standard library only. It imports nothing from the repository.
"""
# This file is passed as text to another Python.
# ruff: noqa: PTH107, PTH123

import ctypes
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

PR_SET_DUMPABLE = 4
WORST = ("passed", "xfailed", "failed")
POLL_S = 0.5


def run_tests(order: Any, log: str, controlled: Any) -> Any:
    """Run the tests and return the record. If there are `controlled` tests, run only those and request them to fail."""
    events, events_of_child = os.pipe()
    answers_of_child, answers = os.pipe()
    command = [order["python"], "-c", order["plugin"], str(events_of_child), str(answers_of_child)]
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [*command, json.dumps(controlled), order["runner"], *order["files"]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(events_of_child, answers_of_child),
        )
    os.close(events_of_child)
    os.close(answers_of_child)
    outcomes: dict[str, str] = {}
    bodies, ended, announced = set(), set(), None
    for event in read_events(child, events):
        if event[0] == "end of body":
            bodies.add(event[1])
            os.write(answers, b"1" if controlled else b"0")
        elif event[0] == "report":
            _, name, phase, outcome = event
            outcomes[name] = max(outcomes.get(name, "passed"), outcome, key=WORST.index)
            ended |= {name} if phase == "teardown" else set()
        else:
            announced = event[1]
    for name, outcome in outcomes.items():
        if name not in ended or (outcome == "passed" and name not in bodies and not controlled):
            outcomes[name] = "failed"
    return {"is_whole": announced in (0, 1) and announced == child.wait(), "outcomes": outcomes}


def read_events(child: Any, events: int) -> Iterator[Any]:
    """Yield events until the process has ended. Raises ValueError for a malformed one."""
    unread = b""
    while True:
        is_over = child.poll() is not None
        ready, _, _ = select.select([events], [], [], 0 if is_over else POLL_S)
        chunk = os.read(events, 1 << 16) if ready else b""
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            yield json.loads(line)
        if not chunk and (ready or is_over):
            return


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # other processes of the same user cannot read this one
    with open(sys.argv[1]) as file:
        order = json.load(file)
    os.remove(sys.argv[1])
    tests = run_tests(order, "/tmp/tests.log", [])
    control = run_tests(order, os.devnull, order["controlled"])
    print(json.dumps({"sign": order["sign"], "tests": tests, "control": control}))


if __name__ == "__main__":
    main()
