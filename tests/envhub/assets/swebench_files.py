"""SWE-bench's files, small and in their true form: git repositories, instances out of their commits, an environment."""

import json
import shutil
import subprocess
from importlib.metadata import distribution
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.envhub.swe.tests import PACKAGES

REPO = "acme/fruit"
GIT = ("git", "-c", "user.name=Ann", "-c", "user.email=ann@example.org", "-c", "commit.gpgsign=false")

COUNTING = '"""Counting."""\n\n\ndef count(names):\n    return len(names)\n'
WRONG = "\n\ndef heaviest(weights):\n    return min(weights, key=weights.get)\n"
RIGHT = '\n\ndef heaviest(weights):\n    """The first."""\n    return max(sorted(weights), key=weights.get)\n'
PEEL = "def peel(name):\n    return name.strip()\n"
TEST_COUNT = "from fruit.scales import count\n\n\ndef test_count():\n    assert count(['fig', 'plum']) == 2\n"
TEST_HEAVIEST = (
    "\n\n@pytest.mark.parametrize('weights', [{'a b': 2, 'fig': 1}, {'plum': 1}], ids=['two of them', 'one'])\n"
    "def test_heaviest(weights):\n    assert heaviest(weights) == max(weights, key=weights.get)\n"
    "\n\n@pytest.mark.xfail\ndef test_of_none():\n    heaviest({})\n"
)
BEFORE = {
    "src/fruit/__init__.py": "",
    "src/fruit/scales.py": COUNTING + WRONG,
    "src/fruit/data.bin": b"\x00\xff\n",
    "tests/test_scales.py": TEST_COUNT,
    "tests/test_old.py": "def test_old():\n    assert True\n",
    "tests/conftest.py": "import fruit\n",
    "setup.cfg": "[tool:pytest]\naddopts = -ra\n",
    "run.sh": "echo hello\n",
    "passwords": Path("/etc/passwd"),  # a link that leads out
    ".gitignore": "*.so\n_version.py\n",
}
REPAIR = {"src/fruit/scales.py": COUNTING + RIGHT, "src/fruit/peel.py": PEEL, "run.sh": None}
REPAIR_TESTS = {
    "tests/test_scales.py": "import pytest\n\nfrom fruit.peel import peel\nfrom fruit.scales import count, heaviest\n"
    + TEST_COUNT.partition("\n")[2]
    + TEST_HEAVIEST
    + "\n\ndef test_peel():\n    assert peel(' fig ') == 'fig'\n",
    "tests/test_old.py": None,
}
FAIL_TO_PASS = ["tests/test_scales.py::test_heaviest[two", "tests/test_scales.py::test_peel"]
PASS_TO_PASS = ["tests/test_scales.py::test_count", "tests/test_scales.py::test_of_none"]

RUNNERS = {  # stand-ins of the same form as theirs, by repository
    "django/django": {
        "tests/test_sqlite.py": "",
        "tests/runtests.py": """import argparse, sys, unittest
parser = argparse.ArgumentParser()
for name, kind in (("settings", str), ("parallel", int), ("verbosity", int)):
    parser.add_argument("--" + name, type=kind)
parser.add_argument("labels", nargs="*")
options = parser.parse_args()
assert (options.settings, options.parallel, options.verbosity) == ("test_sqlite", 1, 2)
import django, test_sqlite
suite = unittest.defaultTestLoader.loadTestsFromNames(options.labels)
result = unittest.TextTestRunner(verbosity=2).run(suite)
sys.exit(bool(result.failures or result.errors))
""",
    },
    "sympy/sympy": {
        "sympy/utilities/__init__.py": "",
        "sympy/utilities/runtests.py": """import os

class SymPyTests:
    _seed = 7

    def test(self, path, timeout):
        names, is_good = {}, True
        exec(compile(open(path).read(), path, "exec"), names)
        for name in [name for name in names if name.startswith("test_")]:
            try:
                self._timeout(names[name], timeout, False) if timeout else names[name]()
                print(name, "ok")
            except Exception as error:
                print(name, {"Skipped": "s", "XFail": "f"}.get(type(error).__name__, "F"))
                is_good = is_good and type(error).__name__ in ("Skipped", "XFail")
        return is_good

    def _timeout(self, function, timeout, fail_on_timeout):
        function()

def test(*paths, subprocess=True, verbose=False, timeout=False):
    assert verbose and not subprocess and os.environ["SYMPY_USE_CACHE"] == "no"
    return all([SymPyTests().test(path, timeout) for path in paths])
""",
    },
}
OWN_TESTS = {  # in the test patch
    "django/django": (
        "tests/fruit/tests.py",
        """import unittest
import unittest.mock

from django.scales import count, heaviest

class FruitTests(unittest.TestCase):
    def test_heaviest(self):
        self.assertEqual(heaviest({"fig": 1, "plum": 2}), "plum")

    def test_both(self):
        \"""
        A docstring that begins on its second line.
        \"""
        self.assertEqual(heaviest({"fig": 1, "plum": 2}), "plum")

    def test_said(self):
        \"""The heavier of two, as a sentence.\"""
        for weights in ({"fig": 1}, {"fig": 1, "plum": 2}):
            with self.subTest(weights=weights):
                self.assertEqual(heaviest(weights), max(weights))

    def test_count(self):
        self.assertEqual(count(["fig"]), 1)

    def test_of_a_result(self):
        class Inner(unittest.TestCase):
            def runTest(self):
                self.fail()

        result = unittest.mock.Mock()  # as Django's RemoteTestResult, it has no lists
        Inner().run(result)
        result.addFailure.assert_called_once()

    def test_kept(self):
        \"""Words of a test that is skipped too.\"""

    @unittest.skip("no reason")
    def test_kept_and_skipped(self):
        \"""Words of a test that is skipped too.\"""

    @unittest.skip("no reason")
    def test_skipped(self):
        pass

    @unittest.expectedFailure
    def test_expected(self):
        self.fail()

    @unittest.expectedFailure
    def test_unexpected(self):
        pass

    def test_part(self):
        with self.subTest(part=1):
            self.fail()

    def test_twice(self):
        \"""The same words.\"""

    def test_twice_fails(self):
        \"""The same words.\"""
        self.fail()

class NeverTests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise ValueError

    def test_never(self):
        pass
""",
    ),
    "sympy/sympy": (
        "sympy/fruit/tests/test_scales.py",
        """from sympy.scales import count, heaviest

class Skipped(Exception):
    pass

class XFail(Exception):
    pass

def test_heaviest():
    assert heaviest({"fig": 1, "plum": 2}) == "plum"

def test_count():
    assert count(["fig"]) == 1

def test_skipped():
    raise Skipped

def test_expected():
    raise XFail

def test_raises():
    raise ValueError

def test_twice():
    pass

test_again = test_twice

def test_twice():
    raise ValueError
""",
    ),
}


def of_fruit(*names: str) -> list[str]:
    return [f"test_{name} (fruit.tests.FruitTests)" for name in names]


NEVER = [*of_fruit("skipped", "expected", "unexpected", "part"), "The same words."]
OWN_LISTS = {  # FAIL_TO_PASS, PASS_TO_PASS and those that never pass
    "django/django": (
        [*of_fruit("heaviest", "both"), "The heavier of two, as a sentence."],
        [*of_fruit("count", "of_a_result"), "Words of a test that is skipped too."],
        [*NEVER, "test_never (fruit.tests.NeverTests)"],
    ),
    "sympy/sympy": (["test_heaviest"], ["test_count"], ["test_skipped", "test_expected", "test_raises", "test_twice"]),
}


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run([*GIT, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def write_clone(clones: Path) -> dict[str, Any]:
    """A repository with a past, the commit of an instance, its repair and what came later; return the instance."""
    commits = {"past": {"README": "in the beginning\n"}, "base": BEFORE, "repair": REPAIR, "tests": REPAIR_TESTS}
    instance = _instance(clones, REPO, commits | {"later": {"LATER": "and then\n"}}, FAIL_TO_PASS, PASS_TO_PASS)
    (clones / "acme__fruit/run.sh").touch()  # a clone in which somebody works
    return instance | {
        "instance_id": "acme__fruit-7",
        "problem_statement": "heaviest() gives the lightest.\n\nAnd I miss fruit.peel.peel(name).",
        "created_at": "2024-01-02T03:04:05Z",
        "version": "1.2",
        "environment_setup_commit": instance["base_commit"],
    }


def write_own(clones: Path, repo: str) -> dict[str, Any]:
    """A repository of the form of Django's or SymPy's; return its instance."""
    package = repo.partition("/")[0]
    path, tests = OWN_TESTS[repo]
    scales = f"{package}/scales.py"
    commits = {
        "base": RUNNERS[repo] | {f"{package}/__init__.py": "", scales: COUNTING + WRONG, "tests/test_old.py": "old\n"},
        "repair": {scales: COUNTING + RIGHT},
        "tests": {path: tests, "docs/fruit.txt": "text\n", "tests/test_old.py": None},
    }
    made = _instance(clones, repo, commits, *OWN_LISTS[repo][:2])
    return made | {"instance_id": f"{package}__{package}-1", "problem_statement": "heaviest() gives the lightest."}


def write_environment(environment: Path) -> None:
    """What `pip install -e` of the repository in /testbed leaves, pytest included, on the system's own Python."""
    version_program = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.check_output(["/usr/bin/python3", "-c", version_program], text=True).strip()
    packages = environment / "lib" / f"python{version}" / "site-packages"
    packages.mkdir(parents=True)
    (environment / "bin").mkdir()
    (environment / "bin/python").symlink_to("/usr/bin/python3")
    (environment / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (packages / "fruit.pth").write_text("/testbed/src\n")
    for name in PACKAGES:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        origin = Path(spec.origin)
        if origin.name == "__init__.py":
            shutil.copytree(origin.parent, packages / name)  # with its bytecode, if that is of the same Python
        else:
            shutil.copy(origin, packages)
    pluggy = distribution("pluggy").locate_file(f"pluggy-{version_of('pluggy')}.dist-info")  # pytest says its version
    shutil.copytree(str(pluggy), packages / Path(str(pluggy)).name)
    # As pip does: the sandbox cannot write there, and would compile pytest in each run.
    subprocess.run(["/usr/bin/python3", "-m", "compileall", "-qq", str(packages)], check=True)


def _instance(
    clones: Path, repo: str, commits: dict[str, dict[str, Any]], broken: list[str], others: list[str]
) -> dict[str, Any]:
    """Write a repository with these commits, by their messages; return what its instance has of them."""
    folder = clones / repo.replace("/", "__")
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "--initial-branch=main")
    made = {said: _commit(folder, files, said) for said, files in commits.items()}
    return {
        "repo": repo,
        "base_commit": made["base"],
        "patch": git(folder, "diff", made["base"], made["repair"]),
        "test_patch": git(folder, "diff", made["repair"], made["tests"]),
        "FAIL_TO_PASS": json.dumps(broken),
        "PASS_TO_PASS": json.dumps(others),
    }


def _commit(folder: Path, files: dict[str, Any], said: str) -> str:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        elif isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", said)
    return git(folder, "rev-parse", "HEAD").strip()
