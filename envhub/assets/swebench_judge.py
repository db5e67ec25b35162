"""Judge whether an instance is resolved: run its tests on the policy's files, and read the reports of their runner.

As in SWE-bench, the tests run in one process with the code that they test. So that code could forge reports. The judge
is another process, which records the reports. The processes that it starts cannot read it (it is not dumpable), and it
alone knows the sign that makes a report valid. A reported failure cannot be revoked, and a run that ends early passes
no test. Then the judge runs some tests again, and requests each of them to fail after its body has passed. If one is
reported as passed all the same, the reports are forged, and no test counts as passed.
"""

import posixpath
import random
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.envhub.assets.swebench_checkout import Checkout
from slipstream.envhub.assets.swebench_instance import Instance, Playable
from slipstream.envhub.assets.swebench_run import ENVIRONMENT, run_in_testbed
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.file_tree import Node, Tree, file
from slipstream.envhub.isolation.layer import WHITEOUT, whiteout
from slipstream.envhub.name_list import name_list

# Files that a runner of tests and Python load automatically. A policy's changes to them are undone, unless the real
# repair changes them too.
LOADED_UNASKED = name_list(
    """
    conftest.py, pytest.ini, .pytest.ini, tox.ini, setup.cfg, pyproject.toml, sitecustomize.py, usercustomize.py,
    tests/runtests.py, tests/test_sqlite.py
    """  # the last two are Django's
)
MAX_LOG_BYTES = 1500
TESTS_S = 1800.0  # of a run of the tests, SWE-bench's own
MAX_CONTROLLED = 50  # tests that are run again to fail: all that were broken, and a sample of the others
JUDGE = Path(__file__).with_name("swebench_tests.py").read_text()
# Without "" in sys.path, modules in the repository's root do not hide the standard library's.
PLUGIN = 'import sys\nsys.path.remove("")\n' + Path(__file__).with_name("swebench_plugin.py").read_text()


class _Run(msgspec.Struct):
    """The judge's record of one run of the tests."""

    is_whole: bool  # it ran to its end, with the exit code that it had announced
    outcomes: dict[str, str]  # by a test's names, one a line: the worst outcome, "passed", "xfailed" or "failed"


class _Report(msgspec.Struct):
    sign: str
    tests: _Run
    control: _Run  # the second run, in which no test may pass


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    failing: tuple[str, ...]  # the instance's tests that do not pass
    log: str  # the end of the runner's output


_WORKING: set[Playable] = set()  # the instances whose real repair passes their tests here; checked once in a process


async def is_resolved(layer: Tree, *, playable: Playable, checkout: Checkout) -> bool:
    """Whether all of FAIL_TO_PASS and PASS_TO_PASS pass with `layer`.

    Raises EnvError if they do not pass with the real repair either: then the tests do not work here.
    """
    outcome = await _run_tests(layer, playable=playable, checkout=checkout)
    if outcome.failing and playable not in _WORKING:
        best = await _run_tests(checkout.repaired, playable=playable, checkout=checkout)
        if best.failing:
            raise EnvError(
                f"{playable.instance.instance_id}: with its own patch {len(best.failing)} of its "
                f"{len(playable.instance.tests)} tests do not pass in {playable.environment}: "
                f"{', '.join(best.failing[:5])}; the runner's output: {best.log}"
            )
    _WORKING.add(playable)
    return not outcome.failing


def judged(layer: Tree, tests: Tree, *, repaired: Tree) -> Tree:
    """Return `layer` with `tests`, and without changes to git's files and to those in LOADED_UNASKED.

    A policy may change a file that the real repair, `repaired`, changes.
    """
    changed = {_plain(path) for path in repaired}
    kept = {path: node for path, node in layer.items() if not _is_undone(_plain(path), changed)}
    for test in map(_plain, tests):
        kept = {path: node for path, node in kept.items() if not _hides(path, node, test)}
    return kept | tests


async def _run_tests(layer: Tree, *, playable: Playable, checkout: Checkout) -> _Outcome:
    """Run the instance's tests with `layer`. All of them fail if the report is not valid."""
    wanted = playable.instance.tests
    sign, path = secrets.token_hex(16), f".{secrets.token_hex(8)}"
    order = {
        "sign": sign,
        "python": f"{ENVIRONMENT}/bin/python",
        "plugin": PLUGIN,
        "runner": playable.instance.runner,
        "files": _files(playable.instance, checkout.tests),
        "controlled": _controlled(playable),
    }
    added = {path: file(msgspec.json.encode(order).decode())}
    tree = judged(layer, checkout.tests | added, repaired=checkout.repaired)
    command = f"/usr/bin/python3 -I -S -c {shlex.quote(JUDGE)} {path}\necho; tail -c {MAX_LOG_BYTES} /tmp/tests.log"
    finished = await run_in_testbed(command, tree, playable=playable, checkout=checkout, timeout_s=TESTS_S)
    reported, _, log = finished.output.partition("\n")
    passed = _passed(reported, sign=sign)
    return _Outcome(failing=tuple(name for name in wanted if name not in passed), log=log.strip())


def _controlled(playable: Playable) -> list[str]:
    """Return the tests to run again and to fail: all that were broken, and a sample of the others."""
    broken, others = playable.instance.by_kind
    sample = random.SystemRandom().sample(others, min(len(others), max(0, MAX_CONTROLLED - len(broken))))
    return [*broken, *sample]


def _files(instance: Instance, tests: Tree) -> list[str]:
    """Return what the runner is to run: the files of the named tests, or, as in SWE-bench, those of the test patch."""
    if instance.runner == "pytest":
        return sorted({name.partition("::")[0] for name in instance.tests})
    files = sorted(path for path in tests if path.endswith(".py") and path == _plain(path))
    if instance.runner == "sympy":
        return files
    return [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in files]


def _passed(reported: str, *, sign: str) -> set[str]:
    """Return the tests that have passed; none if the report is not valid."""
    try:
        report = msgspec.json.decode(reported, type=_Report)
    except MALFORMED:
        return set()
    forged = "passed" in report.control.outcomes.values()
    if report.sign != sign or forged or not (report.tests.is_whole and report.control.is_whole):
        return set()
    passed: set[str] = set()
    failed: set[str] = set()  # no test of a name may fail; in SWE-bench its last test counts
    for names, outcome in report.tests.outcomes.items():
        (failed if outcome == "failed" else passed).update(names.split("\n"))
    return passed - failed


def _is_undone(name: str, changed: set[str]) -> bool:
    is_gits = name == ".git" or name.startswith(".git/")
    is_loaded = name in LOADED_UNASKED or posixpath.basename(name) in LOADED_UNASKED
    return is_gits or (is_loaded and name not in changed)


def _hides(path: str, node: Node, test: str) -> bool:
    """Whether the node at `path` of a layer would replace or hide the file `test`."""
    below = path == test or path.startswith(f"{test}/")
    return below or path == whiteout(test) or (test.startswith(f"{path}/") and node.kind != "folder")


def _plain(path: str) -> str:
    """Return the path that `path` of a layer changes or deletes."""
    folder, name = posixpath.split(path)
    return posixpath.join(folder, name.removeprefix(WHITEOUT))
