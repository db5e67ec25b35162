"""The house: each folder has few files and says what question it answers, and what we alone run is apart."""

import ast
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
ROOMS = ("learner", "actors", "replay", "envhub", "common", "tools")
MAX_FILES = 25


def folders(*tops: str) -> dict[str, list[Path]]:
    """The folders below `tops` with Python files, and these files but for `__init__.py`."""
    found: dict[str, list[Path]] = {}
    for path in (path for top in tops for path in (REPOSITORY / top).rglob("*.py")):
        files = found.setdefault(str(path.parent.relative_to(REPOSITORY)), [])
        files += [path] if path.name != "__init__.py" else []
    return found


def test_no_folder_has_more_files_than_one_looks_through() -> None:
    assert {name: len(files) for name, files in folders(*ROOMS, "tests").items() if len(files) > MAX_FILES} == {}


def test_every_folder_says_in_one_line_what_question_it_answers() -> None:
    silent = []
    for name in folders(*ROOMS):
        module = ast.parse((REPOSITORY / name / "__init__.py").read_text())
        said = ast.get_docstring(module) or ""
        if not said or "\n" in said or len(module.body) != 1:
            silent.append(name)
    assert silent == []


def test_nothing_but_the_lab_names_the_lab() -> None:
    """Imports are lint-imports' to find; this finds commands and names in text."""
    others = (files for name, files in folders(*ROOMS).items() if not name.startswith("tools/lab"))
    assert [path for files in others for path in files if "slipstream.tools.lab" in path.read_text()] == []


def test_no_two_files_of_the_product_have_one_name() -> None:
    """So that a name is enough to find a file; an environment's main file has the name of its folder."""
    paths = [path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py") if "lab" not in path.parts]
    names = Counter(path.name for path in paths if not path.name.startswith("__") and path.stem != path.parent.name)
    assert [name for name, count in names.items() if count > 1] == []
