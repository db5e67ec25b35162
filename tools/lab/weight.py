"""How heavy the project is, beside its goals: `python -m slipstream.tools.lab.weight`. It counts tracked text files."""

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path

from slipstream.common.config.config import Config
from slipstream.tools.cli.verb_table import GROUPS, VERBS

ROOMS = ("common", "envhub", "replay", "actors", "learner", "tools")
LAB = "tools/lab/"
IDEA = (
    "slipstream.common.records.trajectory",
    "slipstream.actors.episode.rollout",
    "slipstream.replay.buffer.verbs",
    "slipstream.learner.step.loss",
    "slipstream.learner.learn",
)
IMPORTED = """
import importlib, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
files = {module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
ours = [file for file in files if file.startswith(sys.argv[1]) and ".venv" not in file and file.endswith(".py")]
print(len(ours), sum(len(open(file, encoding="utf-8").read().splitlines()) for file in ours))
"""


def main() -> int:
    files = [Path(name) for name in _lines(["git", "ls-files"])]
    texts = {file: text for file in files if file.is_file() and (text := _text(file)) is not None}
    lab = {file for file in texts if str(file).startswith(LAB)}
    tests = {file for file in texts if file.parts[0] == "tests"}
    docs = {file for file in texts if file.parts[0] == "docs"}
    locks = {file for file in texts if file.parts[0] == "requirements"}  # most of it is written by `make lock`
    product = texts.keys() - lab - tests - docs - locks
    num_files, num_lines = imported(*IDEA)
    names = Counter(file.name for file in product if file.parts[0] in ROOMS and file.suffix == ".py")
    names.pop("__init__.py", None)
    folders = Counter(file.parent for file in files if file.suffix == ".py" and file.name != "__init__.py")
    largest, size = folders.most_common(1)[0]
    rows: list[tuple[str, int | str, int | str]] = [
        ("product, lines", _num_lines(texts, product), 66_000),
        ("lab, lines", _num_lines(texts, lab), 9_000),
        ("tests, lines", _num_lines(texts, tests), 60_000),
        ("docs, words", sum(len(texts[file].split()) for file in docs if file.suffix == ".md"), 45_000),
        ("settings", num_settings(), 120),
        ("options of verbs", num_options(), 90),
        ("verbs", sum(map(len, GROUPS.values())), 22),
        (f"files in the largest folder, {largest}", size, 25),
        ("names that several files have", sum(count > 1 for count in names.values()), 0),
        ("files that the five idea files import", num_files, 200),
        ("lines of these", num_lines, 26_000),
        ("files that any verb imports", imported("slipstream.tools.cli.cli")[0], "-"),
    ]
    for what, measured, goal in rows:
        print(f"{what:<60} {measured:>8,} {goal if isinstance(goal, str) else f'{goal:,}':>8}")
    return 0


def imported(*names: str) -> tuple[int, int]:
    """The files of ours that importing `names` loads, and their lines."""
    command = [sys.executable, "-c", IMPORTED, str(Path.cwd()), *names]
    num_files, num_lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(num_files), int(num_lines)


def num_settings() -> int:
    """The keys of a run's configuration, without those of nested sections' names."""

    def leaves(kind: type) -> int:
        return sum(
            leaves(value) if isinstance(value := field.default_factory, type) and dataclasses.is_dataclass(value) else 1
            for field in dataclasses.fields(kind)
        )

    return leaves(Config)


def num_options() -> int:
    """The options and operands of all verbs, without those that all have. The second word of a verb is an operand."""
    found = set()
    for name, verb in VERBS.items():
        first, *second = name.split()
        own = [field.name for field in dataclasses.fields(verb.own)] if verb.own else []
        found |= {(first, option) for option in [*own, *verb.arguments, *("second word" for _ in second)]}
    return len(found)


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def _num_lines(texts: dict[Path, str], files: set[Path]) -> int:
    return sum(len(texts[file].splitlines()) for file in files)


def _lines(command: list[str]) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
