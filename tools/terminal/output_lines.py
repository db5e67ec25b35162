"""Lines of text for a terminal, and lines of JSON for a program."""

import json
from collections.abc import Iterable
from typing import Any

from rich.cells import chop_cells
from rich.console import Console

from slipstream.common.process.printable import printable


def printable_lines(text: str, console: Console, *, indent: int) -> list[str]:
    """The lines of `text` without control characters, split so that a terminal does not wrap them at `indent` columns.

    A wrapped line would continue at the left edge, where it could pass for one of our own lines.
    """
    lines = [printable(line) for line in text.split("\n")]
    if not console.is_terminal:
        return lines
    width = max(2, console.width - indent)
    return [piece for line in lines for piece in chop_cells(line, width) or [""]]


def print_json(records: Iterable[dict[str, Any]]) -> int:
    """Print each record as one line of JSON, with null for a number that is not finite; return 0."""
    for record in records:
        print(json_line(json.loads(json.dumps(record), parse_constant=lambda _: None)))
    return 0


def json_line(record: dict[str, Any]) -> str:
    """`record` as one line of ASCII JSON, which is safe to print in a terminal."""
    return json.dumps(record, allow_nan=False)
