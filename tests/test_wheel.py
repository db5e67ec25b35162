"""The wheel that is built from this tree, in an environment that does not have the tree."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.processes import CLI, REPOSITORY, Done, python

ROOMS = ("learner", "actors", "replay", "envhub", "common", "tools", "conf")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    for name in (*ROOMS, "requirements", "src"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(REPOSITORY / name, tree / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tree)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(tree)], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, *arguments: str, cwd: Path) -> Done:
    """Python without this tree: the wheel's files, and the packages that it depends on."""
    # A path in PYTHONPATH is no site directory: its .pth files, and with them an editable installation, have no effect.
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    return python("-S", *arguments, cwd=cwd, timeout_s=300, PYTHONPATH=path)


def test_its_extras_are_those_of_the_page(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    extras = re.findall(r"^Provides-Extra: (.*)$", metadata.read_text(), re.MULTILINE)
    page = (REPOSITORY / "docs" / "install.md").read_text()
    listed = page.split("extras are ")[1].split(" |")[0].replace("`hub:NAME`", "")
    assert sorted(extras) == sorted(re.findall(r"`(\w+)`", listed))


def test_a_verb_runs_from_any_folder_with_the_recipes_that_the_wheel_brings(installed: Path, tmp_path: Path) -> None:
    arguments = ["up", "conf/quickstart.yaml", "--print-config", f"run.root={tmp_path}"]
    done = run(installed, *CLI, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "name: quickstart" in done.stdout
    lacking = "from slipstream.tools.run import doctor; doctor.PACKAGES = ('none',); doctor.check_machine()"
    assert "install the wheel with its extra `gpu`, or `cpu`" in run(installed, "-c", lacking, cwd=tmp_path).stderr


def test_every_room_comes_from_the_wheel_with_its_data_and_its_types(installed: Path, tmp_path: Path) -> None:
    modules = "learner.fit.fit_options", "actors.engine.shadow_memory", "envhub.shop.products", "common.config.config"
    program = "".join(f"import slipstream.{name}; " for name in (*modules, "tools.cli.cli"))
    program += "from slipstream.replay.records import scripts; print(scripts.__file__)"
    done = run(installed, "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(installed / "slipstream" / "replay" / "records" / "scripts.py")
    assert (installed / "slipstream" / "py.typed").exists()
    assert [path.name for path in installed.iterdir() if path.suffix != ".dist-info"] == ["slipstream"]


def test_all_of_the_rooms_is_in_the_wheel_but_for_the_lab(installed: Path) -> None:
    kinds = (".py", ".lua", ".yaml", ".sbatch", ".html", ".js", ".css")
    there = {path.relative_to(installed / "slipstream") for path in installed.rglob("*") if path.suffix in kinds}
    files = (path for room in ROOMS for path in (REPOSITORY / room).rglob("*"))
    here = {path.relative_to(REPOSITORY) for path in files if path.suffix in kinds}
    left_out = {str(path.parent) for path in here - there}
    assert {tuple(Path(name).parts[:2]) for name in left_out} == {("tools", "lab")}
    assert there - here == {Path("__init__.py")}
