"""Whether an instance is resolved: its tests, run by pytest on what a policy left, and judged by what pytest reports.

As in SWE-bench, the tests run in one process with the code that they judge, which can do there what it likes. So that a
forged report is not believed, it must bear a sign that this process threw away before anything of the repository was
imported, and must say of a test that fails on purpose that it has failed.
"""

import posixpath
import secrets
import shlex
from dataclasses import dataclass

import msgspec

from envhub.env import EnvError
from envhub.isolation.file_tree import Node, Tree, file
from envhub.isolation.layer import GONE, gone
from envhub.assets.swebench_checkout import Checkout
from envhub.assets.swebench_instance import Playable
from envhub.assets.swebench_run import ENVIRONMENT, run_in_testbed

# What pytest and Python load unasked: as it was before the repair, unless the people's repair changes it.
LOADED_UNASKED = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml",
                  "sitecustomize.py", "usercustomize.py")  # fmt: skip
MAX_SAID_BYTES = 1500
# For Python 3.6 on. What has passed is `setup`, `call` and `teardown`, all that there was, or was expected to fail.
_JUDGE = """
import sys
sys.path.remove("")
import json, os, pytest
with open("{path}") as file:
    sign = file.read()
os.remove("{path}")

class Listener:
    def __init__(self):
        self.outcomes = {{}}

    def pytest_runtest_logreport(self, report):
        passed = report.passed or (report.skipped and hasattr(report, "wasxfail"))
        self.outcomes[report.nodeid] = self.outcomes.get(report.nodeid, True) and passed

listener = Listener()
pytest.main(["-p", "no:cacheprovider"] + sys.argv[1:], plugins=[listener])
with os.fdopen(3, "w") as out:
    out.write(json.dumps({{"sign": sign, "outcomes": listener.outcomes}}))
    out.flush()
    os._exit(0)
"""


class _Report(msgspec.Struct):
    sign: str
    outcomes: dict[str, bool]  # by test


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    failing: tuple[str, ...]  # of the instance's tests, those that do not pass
    said: str  # how pytest ends


_WORKING: set[Playable] = set()  # the instances whose own repair passes their tests here: a process finds out once


async def is_resolved(layer: Tree, *, playable: Playable, checkout: Checkout, timeout_s: float) -> bool:
    """Whether with `layer` all of FAIL_TO_PASS and PASS_TO_PASS pass.

    Raises EnvError where they do not even with the people's repair: then nobody can be judged by them here.
    """
    outcome = await _run_tests(layer, playable=playable, checkout=checkout, timeout_s=timeout_s)
    if outcome.failing and playable not in _WORKING:
        best = await _run_tests(checkout.repaired, playable=playable, checkout=checkout, timeout_s=timeout_s)
        if best.failing:
            raise EnvError(
                f"{playable.instance.instance_id}: with its own patch {len(best.failing)} of its "
                f"{len(playable.instance.tests)} tests do not pass in {playable.environment}: "
                f"{', '.join(best.failing[:5])}; pytest says: {best.said}"
            )
    _WORKING.add(playable)
    return not outcome.failing


def judged(layer: Tree, tests: Tree, *, repaired: Tree) -> Tree:
    """`layer` without what would tell git or pytest something, and with `tests` in the place of what is there.

    What is `repaired` by people may be changed by a policy, too.
    """
    changed = {_plain(path) for path in repaired}
    kept = {path: node for path, node in layer.items() if not _is_undone(_plain(path), changed)}
    for test in map(_plain, tests):
        kept = {path: node for path, node in kept.items() if not _hides(path, node, test)}
    return kept | tests


async def _run_tests(layer: Tree, *, playable: Playable, checkout: Checkout, timeout_s: float) -> _Outcome:
    """What comes of the instance's tests with `layer`: all of them fail where no report is believed."""
    wanted = playable.instance.tests
    files = sorted({name.partition("::")[0] for name in wanted})
    sign, path, decoy = secrets.token_hex(16), f".{secrets.token_hex(8)}", f"test_{secrets.token_hex(4)}"
    beside = posixpath.join(posixpath.dirname(files[-1]), f"{decoy}.py")
    added = {path: file(sign), beside: file(f"def {decoy}():\n    assert not {decoy}\n")}
    tree = judged(layer, checkout.tests | added, repaired=checkout.repaired)
    script = shlex.quote(_JUDGE.format(path=path))
    command = (
        f"{ENVIRONMENT}/bin/python -c {script} {shlex.join([*files, beside])} 3>&1 >/tmp/said 2>&1\n"
        f"echo; tail -c {MAX_SAID_BYTES} /tmp/said"
    )
    finished = await run_in_testbed(command, tree, playable=playable, checkout=checkout, timeout_s=timeout_s)
    reported, _, said = finished.output.partition("\n")
    passed = _passed(reported, sign=sign, decoy=decoy)
    return _Outcome(failing=tuple(name for name in wanted if _word(name) not in passed), said=said.strip())


def _passed(reported: str, *, sign: str, decoy: str) -> set[str]:
    """The tests that have passed; none where the report is not believed."""
    try:
        report = msgspec.json.decode(reported, type=_Report)
    except (msgspec.MsgspecError, RecursionError):
        return set()
    failed = {_word(name) for name, passed in report.outcomes.items() if not passed}
    is_believed = report.sign == sign and any(name.endswith(f"::{decoy}") for name in failed)
    return {_word(name) for name in report.outcomes} - failed if is_believed else set()


def _is_undone(name: str, changed: set[str]) -> bool:
    is_gits = name == ".git" or name.startswith(".git/")
    return is_gits or (posixpath.basename(name) in LOADED_UNASKED and name not in changed)


def _hides(path: str, node: Node, test: str) -> bool:
    """Whether what is at `path` in a layer would be in the way of the file `test`."""
    below = path == test or path.startswith(f"{test}/")
    return below or path == gone(test) or (test.startswith(f"{path}/") and node.kind != "folder")


def _plain(path: str) -> str:
    """`path` of a layer, also where it says that this is gone."""
    folder, name = posixpath.split(path)
    return posixpath.join(folder, name.removeprefix(GONE))


def _word(name: str) -> str:
    """A test's name up to the first blank: so much of it SWE-bench's logs and names have."""
    return name.split(maxsplit=1)[0]
