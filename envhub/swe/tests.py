"""What the code of a repository does, in the sandbox: its tests by pytest, and the calls that judge it.

pytest is this installation's own, shown there read only, on the sandbox's Python; what it says is for the policy to
read. A run that judges says, for each call, what came of it; whether that is right is judged outside, so nothing that
runs inside can make itself pass. It needs no pytest, which would take ten times as long.
"""

import functools
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envhub.env import EnvError
from envhub.isolation.file_tree import Tree, file
from envhub.isolation.sandbox import Limits, require_sandbox, run_in_sandbox
from envhub.swe.repo import Test

PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
INSIDE = "/opt/pytest"
MAX_SHOWN_CHARS = 1500

# Neither site's start nor those of pytest's own plugins that nothing here uses: a sixth of a run's time.
_UNUSED = ("legacypath", "doctest", "junitxml", "pastebin", "debugging", "faulthandler", "stepwise", "setuponly",
           "setupplan", "pytester", "unraisableexception", "threadexception", "cacheprovider")  # fmt: skip
_PYTEST = (
    f"PYTHONPATH={INSIDE}:. PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 COLUMNS=60 /usr/bin/python3 -S -m pytest "
    f"-q --tb=short --no-header -rN --color=no {' '.join(f'-p no:{name}' for name in _UNUSED)} "
)
PATHS = {"PYTHONPATH": f"{INSIDE}:."}  # by which `python3 -m pytest` is this one
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
    said = []
    try:
        module = importlib.import_module(test["module"])
        for call in test["calls"]:
            try:
                said.append(["gives", eval(call, vars(module))])
            except Exception as error:
                said.append(["raises", type(error).__name__])
        with open(f"{name}.said", "w") as file:
            json.dump(said, file)
    except BaseException:  # SystemExit too: then this test says nothing, and the next is asked
        pass
"""


def without_durations(said: str) -> str:
    """What pytest said, without what differs from run to run: durations, and addresses of objects."""
    return _VARYING.sub("", said)


def require_pytest() -> None:
    """Raise ValueError, with what to install, where a sandbox or pytest cannot be had."""
    require_sandbox()
    if importlib.util.find_spec("pytest") is None:
        raise ValueError("this environment runs pytest in a sandbox, and pytest is missing: pip install pytest")


async def run_tests(tree: Tree, *, limits: Limits) -> str:
    """What pytest says of the tests in `tree`; nothing that a run changes is kept.

    Raises EnvError where pytest itself does not start.
    """
    finished = await run_in_sandbox(f"{_PYTEST} tests", tree, limits=limits, mounts=pytest_mounts())
    if _ENDS.search(finished.output) is None:  # stopped from inside, or no pytest: that is nobody's fault in there
        started = await run_in_sandbox(f"{_PYTEST} --version", {}, limits=limits, mounts=pytest_mounts())
        if started.exit_code != 0:
            raise EnvError(f"pytest does not start in the sandbox: {started.output.strip()[-500:]}")
    return without_durations(finished.output).strip()[-MAX_SHOWN_CHARS:] or "(no output)"


async def passed_tests(modules: Tree, tests: Mapping[str, Test], *, limits: Limits) -> frozenset[str]:
    """The names of those of `tests` all of whose calls give, with these `modules`, what they should.

    Raises EnvError where Python itself does not start.
    """
    calls = {name: {"module": test.module, "calls": test.calls} for name, test in tests.items()}
    tree = modules | {"calls.json": file(json.dumps(calls)), "judge.py": file(_JUDGE)}
    finished = await run_in_sandbox("/usr/bin/python3 -S judge.py", tree, limits=limits)
    left = finished.tree or {}
    passed = frozenset(name for name, test in tests.items() if _said(left, name) == test.right)
    if not passed:  # all of them wrong, or no Python
        started = await run_in_sandbox("/usr/bin/python3 -S -c 'import json'", {}, limits=limits)
        if started.exit_code != 0:
            raise EnvError(f"Python does not start in the sandbox: {started.output.strip()[-500:]}")
    return passed


def _said(tree: Tree, name: str) -> Any:
    """What came of the calls of a test; None where the run left nothing of the kind."""
    try:
        return json.loads(tree[f"{name}.said"].content)
    except (KeyError, ValueError, RecursionError):
        return None


@functools.cache
def pytest_mounts() -> dict[Path, str]:
    """Where what pytest needs is here, and where in the sandbox; `py` is one file, the others are folders."""
    mounts = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            source = origin.parent if origin.name == "__init__.py" else origin
            mounts[source] = f"{INSIDE}/{source.name}"
    return mounts
