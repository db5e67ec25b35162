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


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run([*GIT, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def write_clone(clones: Path) -> dict[str, Any]:
    """A repository with a past, the commit of an instance, its repair and what came later; return the instance."""
    folder = clones / REPO.replace("/", "__")
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "--initial-branch=main")
    commits = [
        _commit(folder, files, said)
        for files, said in (
            ({"README": "in the beginning\n"}, "past"),
            (BEFORE, "base"),
            (REPAIR, "repair"),
            (REPAIR_TESTS, "tests"),
            ({"LATER": "and then\n"}, "later"),
        )
    ]
    (folder / "run.sh").touch()  # a clone in which somebody works
    _, base, repair, tests, _ = commits
    return {
        "repo": REPO,
        "instance_id": "acme__fruit-7",
        "base_commit": base,
        "patch": git(folder, "diff", base, repair),
        "test_patch": git(folder, "diff", repair, tests),
        "problem_statement": "heaviest() gives the lightest.\n\nAnd I miss fruit.peel.peel(name).",
        "hints_text": "Look at min.",
        "created_at": "2024-01-02T03:04:05Z",
        "version": "1.2",
        "FAIL_TO_PASS": json.dumps(FAIL_TO_PASS),
        "PASS_TO_PASS": json.dumps(PASS_TO_PASS),
        "environment_setup_commit": base,
    }


def write_environment(environment: Path) -> None:
    """What `pip install -e` of the repository in /testbed leaves, pytest included, on the system's own Python."""
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
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
            shutil.copytree(origin.parent, packages / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, packages)
    pluggy = distribution("pluggy").locate_file(f"pluggy-{version_of('pluggy')}.dist-info")  # pytest says its version
    shutil.copytree(str(pluggy), packages / Path(str(pluggy)).name)
    # As pip does: the sandbox cannot write there, and would compile pytest in each run.
    subprocess.run(["/usr/bin/python3", "-m", "compileall", "-qq", str(packages)], check=True)


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
