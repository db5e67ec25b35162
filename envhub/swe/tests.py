"""Runs the code of a repository in the sandbox: its own tests by pytest, and the calls that judge it.

pytest is the one of this installation, mounted read only, and runs on the sandbox's Python. Its output is for the
policy. A judging run only reports the result of each call. The comparison with the correct result happens outside, so
no code in the sandbox can make itself pass. A judging run does not use pytest, which would take ten times as long.
"""

import functools
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.file_tree import Tree, file
from slipstream.envhub.isolation.sandbox import KILLED, Limits, require_sandbox, run_in_sandbox
from slipstream.envhub.name_list import name_list
from slipstream.envhub.swe.repo import Test

PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
INSIDE = "/opt/pytest"
MAX_SHOWN_CHARS = 1500

# The plugins of pytest that are not needed. Without them and without `site` (-S), a run takes a sixth less time.
_UNUSED = name_list(
    """
    legacypath, doctest, junitxml, pastebin, debugging, faulthandler, stepwise, setuponly, setupplan, pytester,
    unraisableexception, threadexception, cacheprovider
    """
)
_PYTEST = (
    f"PYTHONPATH={INSIDE}:. PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 COLUMNS=60 /usr/bin/python3 -S -m pytest "
    f"-q --tb=short --no-header -rN --color=no {' '.join(f'-p no:{name}' for name in _UNUSED)} "
)
PATHS = {"PYTHONPATH": f"{INSIDE}:."}  # so that `python3 -m pytest` runs the mounted pytest
_ENDS = re.compile(r"\d+ (passed|failed|skipped|error|deselected|warning)|no tests ran")
_VARYING = re.compile(r" in \d+\.\d+s|(?<=0x)[0-9a-f]{6,}")
_JUDGE = """\
import importlib
import json
import sys

sys.path.insert(0, ".")
with open("calls.json") as file:
    tests = json.load(file)
for name, test in tests.items():
    results = []
    try:
        module = importlib.import_module(test["module"])
        for call in test["calls"]:
            try:
                results.append(["gives", eval(call, vars(module))])
            except Exception as error:
                results.append(["raises", type(error).__name__])
        with open(f"{name}.results", "w") as file:
            json.dump(results, file)
    except BaseException:  # also SystemExit: this test then has no results, and the next one runs
        pass
"""


def without_durations(output: str) -> str:
    """Return pytest's output without durations and addresses of objects, which differ from run to run."""
    return _VARYING.sub("", output)


def require_pytest() -> None:
    """Raise ValueError, with what to install, if the sandbox or pytest is missing."""
    require_sandbox()
    if importlib.util.find_spec("pytest") is None:
        raise ValueError("this environment needs pytest, which is missing; run `pip install pytest`")


async def run_tests(tree: Tree, *, limits: Limits) -> str:
    """Run the tests in `tree` and return pytest's output. Changes of files by the run are dropped.

    Raises EnvError if pytest itself does not start.
    """
    finished = await run_in_sandbox(f"{_PYTEST} tests", tree, limits=limits, mounts=pytest_mounts())
    # Without a summary, either the tests ended pytest, or pytest cannot start, which is not the policy's fault. A run
    # that was killed at its time limit had started.
    if _ENDS.search(finished.output) is None and finished.exit_code != KILLED:
        started = await run_in_sandbox(f"{_PYTEST} --version", {}, limits=limits, mounts=pytest_mounts())
        if started.exit_code != 0:
            raise EnvError(f"pytest does not start in the sandbox: {started.output.strip()[-500:]}")
    return without_durations(finished.output).strip()[-MAX_SHOWN_CHARS:] or "(no output)"


async def passed_tests(modules: Tree, tests: Mapping[str, Test], *, limits: Limits) -> frozenset[str]:
    """Run the calls of `tests` on `modules` and return the names of the tests whose results are all correct.

    Raises EnvError if Python itself does not start.
    """
    calls = {name: {"module": test.module, "calls": test.calls} for name, test in tests.items()}
    tree = modules | {"calls.json": file(json.dumps(calls)), "judge.py": file(_JUDGE)}
    finished = await run_in_sandbox("/usr/bin/python3 -S judge.py", tree, limits=limits)
    left = finished.tree or {}
    passed = frozenset(name for name, test in tests.items() if _results(left, name) == test.right)
    if not passed and finished.exit_code != KILLED:  # all results are wrong, or Python cannot start
        started = await run_in_sandbox("/usr/bin/python3 -S -c 'import json'", {}, limits=limits)
        if started.exit_code != 0:
            raise EnvError(f"Python does not start in the sandbox: {started.output.strip()[-500:]}")
    return passed


def _results(tree: Tree, name: str) -> Any:
    """Return the reported results of a test; None if its file is missing or malformed."""
    try:
        return json.loads(tree[f"{name}.results"].content)
    except (KeyError, ValueError, RecursionError):
        return None


@functools.cache
def pytest_mounts() -> dict[Path, str]:
    """Return the paths of pytest and its dependencies: on this host -> in the sandbox."""
    mounts = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            source = origin.parent if origin.name == "__init__.py" else origin  # `py` is one file
            mounts[source] = f"{INSIDE}/{source.name}"
    return mounts
