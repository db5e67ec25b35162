"""Run pytest in the process of the tested code, and report each test to the judge as it ends.

This file is passed as text to the instance's own Python, 3.6 or later. It stores no result, because the tested code
could change it.
"""

import json
import os
import sys
from typing import Any

import pytest


class Reporter:
    def __init__(self, events: int, answers: int, controlled: Any) -> None:
        self._events, self._answers, self._controlled = events, answers, set(controlled)

    def send(self, *event: Any) -> None:
        os.write(self._events, json.dumps(event).encode() + b"\n")

    def pytest_collection_modifyitems(self, items: Any) -> None:
        if self._controlled:
            items[:] = [item for item in items if item.nodeid.split(None, 1)[0] in self._controlled]

    @pytest.hookimpl(trylast=True)  # runs after the body, if that has passed
    def pytest_runtest_call(self, item: Any) -> None:
        self.send("end of body", item.nodeid)
        if os.read(self._answers, 1) == b"1":
            raise AssertionError("the judge wants to see this test fail")

    def pytest_runtest_logreport(self, report: Any) -> None:
        expected = report.skipped and hasattr(report, "wasxfail")
        outcome = "passed" if report.passed else "xfailed" if expected else "failed"
        self.send("report", report.nodeid, report.when, outcome)


def main() -> None:
    events, answers = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in (events, answers):
        os.set_inheritable(descriptor, False)
    reporter = Reporter(events, answers, json.loads(sys.argv[3]))
    code = int(pytest.main(["-p", "no:cacheprovider", *sys.argv[4:]], plugins=[reporter]))
    reporter.send("exit", code)
    os._exit(code)


if __name__ == "__main__":
    main()
