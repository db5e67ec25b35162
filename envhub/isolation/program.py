"""Extract a Python program from a policy's text: all of it, or a fenced block."""

import re

MAX_PROGRAM_CHARS = 20_000

_FENCED = re.compile(r".*?```\w*[ \t]*\n(.*?)```.*", re.DOTALL)


def program_in(text: str) -> str:
    """Return the content of the first fenced block of `text`, of any language, or all of `text` without one.

    Empty if the program is too long or is not valid text.
    """
    fenced = _FENCED.fullmatch(text)
    program = fenced[1] if fenced else text
    is_text = program.encode(errors="replace").decode() == program
    return program if is_text and len(program) <= MAX_PROGRAM_CHARS else ""
