"""`make docs`: copy docs/ to a folder and add the reference pages made from the code.

`python -m slipstream.tools.lab.docs.docs_pages DIR`. The pages list every verb, every configuration key, and every file
with its public classes and functions.
"""

import ast
import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.common.config.config import Config
from slipstream.tools.cli.verb_table import VERBS, summary_of
from slipstream.tools.terminal.config_help import settings_help

REPOSITORY = Path(__file__).resolve().parents[3]
ROOMS = ("learner", "actors", "replay", "envhub", "common")


def main(arguments: Sequence[str]) -> int:
    """Write the site's sources to the given folder; what it held before is removed."""
    target = Path(arguments[0])
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(REPOSITORY / "docs", target)
    reference = target / "reference"
    reference.mkdir()
    (reference / "verbs.md").write_text(verbs_page())
    (reference / "config.md").write_text(config_page())
    (reference / "files.md").write_text(files_page())
    return 0


def verbs_page() -> str:
    """Every verb with what it does and the settings that it reads."""
    lines = ["# Verbs", "", "After this page you know every command, and which settings it reads."]
    for name, verb in VERBS.items():
        what = summary_of(name)
        settings = ", ".join(f"`{setting}`" for setting in verb.settings) or "none"
        lines += ["", f"## slipstream {name}", "", f"{what[0].upper()}{what[1:]}.", ""]
        lines.append(f"Settings: {settings}. `slipstream {name} --help` lists them with the options.")
    return "\n".join(lines) + "\n"


def config_page() -> str:
    """Every configuration key with its default and its meaning, by section."""
    lines = ["# Configuration keys", "", "After this page you can look up every key: `section.key = default  meaning`."]
    for section in dataclasses.fields(Config):
        lines += ["", f"## {section.name}", "", "```text", settings_help([section.name]), "```"]
    return "\n".join(lines) + "\n"


def files_page() -> str:
    """Every file of the rooms with its first sentence, and its public classes and functions with theirs."""
    lines = ["# Files, classes and functions", "", "After this page you can find the file that does what you look for."]
    for room in ROOMS:
        lines += ["", f"## {room}"]
        for path in sorted((REPOSITORY / room).rglob("*.py")):
            lines += _file(path)
    return "\n".join(lines) + "\n"


def _file(path: Path) -> list[str]:
    module = ast.parse(path.read_text())
    public = [
        node
        for node in module.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]
    if not public and ast.get_docstring(module) is None:
        return []
    title = f"### `{path.relative_to(REPOSITORY)}`"
    return ["", title, "", _first_line(module), "", *(f"- `{node.name}`: {_first_line(node)}" for node in public)]


def _first_line(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    text = (ast.get_docstring(node) or "").partition("\n")[0]
    return text.replace("<", "&lt;").replace("[", "\\[")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
