"""Run an instance's tests in the process of the tested code, and report each test to the judge as it ends.

This file is passed as text to the instance's own Python, 3.5 or later. It stores no result, because the tested code
could change it. What is reported as one test may have several names, each on a line.
"""

import functools
import importlib
import json
import os
import random
import runpy
import sys
import unittest
import unittest.util
from pathlib import Path
from typing import Any


class Reporter:
    def __init__(self, events: int, answers: int, controlled: Any) -> None:
        self._events, self._answers, self._controlled = events, answers, set(controlled)

    def send(self, *event: Any) -> None:
        os.write(self._events, json.dumps(event).encode() + b"\n")

    def runs(self, names: str) -> bool:
        return not self._controlled or not self._controlled.isdisjoint(names.split("\n"))

    def end_body(self, names: str) -> None:
        """Report that the body of a test has passed. Raises AssertionError if the judge wants to see the test fail."""
        self.send("end of body", names)
        if os.read(self._answers, 1) == b"1":
            raise AssertionError("the judge wants to see this test fail")


def run_pytest(reporter: Reporter, files: Any) -> int:
    import pytest

    def names_of(node: str) -> str:
        return node + "\n" + node.split(None, 1)[0]  # SWE-bench's logs and lists have a name up to the first blank

    class Hooks:
        def pytest_collection_modifyitems(self, items: Any) -> None:
            items[:] = [item for item in items if reporter.runs(names_of(item.nodeid))]

        @pytest.hookimpl(trylast=True)  # runs after the body, if that has passed
        def pytest_runtest_call(self, item: Any) -> None:
            reporter.end_body(names_of(item.nodeid))

        def pytest_runtest_logreport(self, report: Any) -> None:
            expected = report.skipped and hasattr(report, "wasxfail")
            outcome = "passed" if report.passed else "xfailed" if expected else "failed"
            reporter.send("report", names_of(report.nodeid), report.when, outcome)

    return int(pytest.main(["-p", "no:cacheprovider", *files], plugins=[Hooks()]))


def run_django(reporter: Reporter, labels: Any) -> int:
    """Run Django's script. SWE-bench reads "ok", "FAIL" and "ERROR" in its log, so that nothing else is reported."""
    run = unittest.TestCase.run
    kinds = ("failures", "errors", "skipped", "expectedFailures", "unexpectedSuccesses")

    def run_reported(test: Any, result: Any = None) -> Any:
        if not isinstance(result, unittest.TextTestResult):  # a test runs this one for a result of its own
            return run(test, result)
        # Its lines in the log: its name, with the method behind the class only since Python 3.11, then its docstring.
        old = test._testMethodName + " (" + unittest.util.strclass(type(test)) + ")"
        names = "\n".join([str(test), old, test.shortDescription() or old])
        if not reporter.runs(names):
            return result
        method = getattr(test, test._testMethodName)

        @functools.wraps(method)
        def body() -> None:
            method()
            reporter.end_body(names)

        setattr(test, test._testMethodName, body)
        before = {kind: len(getattr(result, kind)) for kind in kinds}
        run(test, result)
        grown = {kind for kind in kinds if len(getattr(result, kind)) > before[kind]}
        if not grown or grown & {"failures", "errors"}:
            reporter.send("report", names, "teardown", "failed" if grown else "passed")
        return result

    unittest.TestCase.run = run_reported  # type: ignore[assignment, method-assign]
    tests = Path("tests").resolve()
    script = str(tests / "runtests.py")
    sys.path[:0] = [str(tests), str(tests.parent)]  # before the copy that installing an old version makes
    sys.argv = [script, "--verbosity=2", "--settings=test_sqlite", "--parallel=1", *labels]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def run_sympy(reporter: Reporter, files: Any) -> int:
    """Run what SymPy's bin/test runs. SWE-bench reads "ok", "F" and "E" in its log, so nothing else is reported."""
    os.environ["SYMPY_USE_CACHE"] = "no"
    sys.path.insert(0, str(Path.cwd()))
    try:
        runtests = importlib.import_module("sympy.testing.runtests")
    except ImportError:  # before SymPy 1.6
        runtests = importlib.import_module("sympy.utilities.runtests")

    def run_reported(tests: Any, function: Any, *limits: Any) -> None:
        name = function.__name__
        if not reporter.runs(name):
            return
        random.seed(tests._seed)  # as without a time limit
        try:
            function()
            reporter.end_body(name)
        except Exception as error:
            if type(error).__name__ not in ("Skipped", "XFail", "XPass"):
                reporter.send("report", name, "teardown", "failed")
            raise
        reporter.send("report", name, "teardown", "passed")

    runtests.SymPyTests._timeout = run_reported
    return int(not runtests.test(*files, verbose=True, subprocess=False, timeout=1))


def main() -> None:
    events, answers = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in (events, answers):
        os.set_inheritable(descriptor, False)
    reporter = Reporter(events, answers, json.loads(sys.argv[3]))
    run = {"pytest": run_pytest, "django": run_django, "sympy": run_sympy}[sys.argv[4]]
    code = run(reporter, sys.argv[5:])
    reporter.send("exit", code)
    os._exit(code)


if __name__ == "__main__":
    main()
