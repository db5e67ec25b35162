"""What models and environments wrote, as a terminal may show it."""

import json
from typing import Any


def printable(text: str, *, lines: bool = False) -> str:
    """`text` with everything that is no visible character written out, as \\x1b or \\u202e; `lines` keeps line breaks.

    So no text moves the cursor, hides itself, reorders its neighbours or forges a line of ours. `rich` reads its own
    markup in strings only: show the result as a `rich.text.Text`.
    """
    return "".join(
        character if character.isprintable() or (lines and character == "\n") else _escape(character)
        for character in text
    )


def json_line(record: dict[str, Any]) -> str:
    """One line of JSON in ASCII: a terminal can show it, and a program reads the same text back."""
    return json.dumps(record, allow_nan=False)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
