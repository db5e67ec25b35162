"""What models and environments wrote, as a terminal may show it."""

import json
from typing import Any

from rich.cells import chop_cells
from rich.console import Console


def printable(text: str) -> str:
    """`text` with everything that is no visible character written out, as \\x1b or \\u202e or \\n.

    So no text moves the cursor, hides itself or reorders its neighbours. `rich` reads its own markup in strings only:
    show the result as a `rich.text.Text`.
    """
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def printable_lines(text: str, console: Console, *, indent: int) -> list[str]:
    """The lines of `text`, printable, for a place `indent` columns in: a terminal wraps none of them.

    A line that it wrapped would go on at the left edge, where lines of ours begin.
    """
    lines = [printable(line) for line in text.split("\n")]
    if not console.is_terminal:
        return lines
    width = max(2, console.width - indent)
    return [piece for line in lines for piece in chop_cells(line, width) or [""]]


def json_line(record: dict[str, Any]) -> str:
    """One line of JSON in ASCII: a terminal can show it, and a program reads the same text back."""
    return json.dumps(record, allow_nan=False)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
