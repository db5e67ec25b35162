"""A Python program as a policy writes it: as it is, or in a block."""

import re

MAX_PROGRAM_CHARS = 20_000

_FENCED = re.compile(r".*?```\w*[ \t]*\n(.*?)```.*", re.DOTALL)


def program_in(text: str) -> str:
    """The program in the first block of `text`, whatever the block calls its language, or else all of it.

    Empty where that is none that could be run.
    """
    fenced = _FENCED.fullmatch(text)
    program = fenced[1] if fenced else text
    is_text = program.encode(errors="replace").decode() == program
    return program if is_text and len(program) <= MAX_PROGRAM_CHARS else ""
