"""`slipstream init`: what it writes runs as it is, and it replaces nothing."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.common.config.config import load_config
from slipstream.tools.cli.cli import main
from slipstream.tools.init.init import FILES
from slipstream.tools.run.check_input import check_input
from tests.tools.cli.verbs import Output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("kind", FILES)
def test_a_run_of_what_is_written_is_accepted(kind: str, folder: Path, printed: Output, refused: Output) -> None:
    said = printed("init", kind, "mine")
    written = sorted(path.name for path in folder.iterdir())
    assert written == sorted(file.format("mine") for file in FILES[kind]) and len(written) == 3
    assert f"wrote {', '.join(file.format('mine') for file in FILES[kind])}" in said
    assert not any("NAME" in path.read_text() for path in folder.iterdir())
    check_input(load_config("mine.yaml", ["model.path=model"] if kind == "agent" else []), to_come=["model"])
    before = {path: path.read_text() for path in folder.iterdir() if path.is_file()}
    assert "mine.py, mine.yaml, " in refused("init", kind, "mine")
    assert {path: path.read_text() for path in folder.iterdir() if path.is_file()} == before


def test_the_check_of_an_environment_passes_and_fails_with_it(folder: Path) -> None:
    assert main(["init", "env", "mine"]) == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    assert subprocess.run(command, cwd=folder, capture_output=True).returncode == 0
    module = folder / "mine.py"
    module.write_text(module.read_text().replace('action == "up"', "1"))
    assert subprocess.run(command, cwd=folder, capture_output=True).returncode == 1


def test_a_name_that_python_cannot_import_or_already_has_is_refused(folder: Path, refused: Output) -> None:
    for name in ("a-b", "class", "_mine", "naïve", 33 * "a"):
        assert f"most 32, got '{name}'; such as my_task" in refused("init", "data", name)
    for name in ("json", "slipstream"):
        assert f"{name} is the name of a module that is installed" in refused("init", "data", name)
    assert list(folder.iterdir()) == []
