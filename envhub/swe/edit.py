"""Files as an agent of a repository sees and changes them: by the numbers of their lines."""

import re
from dataclasses import dataclass

_FENCED = re.compile(r"\n```(?:\w*)[ \t]*\n(.*?)```\s*", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Edited:
    content: str | None  # None where it cannot be done
    said: str


def lines_of(content: str) -> list[str]:
    """Its lines as editors count them: other signs that Python would end a line at are part of one."""
    lines = content.split("\n")
    return lines if lines[-1] else lines[:-1]


def numbered(lines: list[str], *, first: int) -> str:
    return "\n".join(f"{number} {line}".rstrip() for number, line in enumerate(lines, first))


def edited(path: str, content: str, *, first: int, last: int, text: str, max_chars: int) -> Edited:
    """The lines `first` to `last` of `content` replaced by those of `text`, which may stand in a block.

    A `last` of `first - 1` puts them before `first`; no lines delete.
    """
    lines = lines_of(content)
    if not (1 <= first <= len(lines) + 1 and first - 1 <= last <= len(lines)):
        return Edited(content=None, said=f"{path} has the lines 1 to {len(lines)}")
    fenced = _FENCED.fullmatch(text)
    new_lines = lines_of(fenced[1] if fenced else text.removeprefix("\n").rstrip())
    new = "".join(f"{line}\n" for line in (*lines[: first - 1], *new_lines, *lines[last:]))
    if len(new) > max_chars or new.encode(errors="replace").decode() != new:
        return Edited(content=None, said="a file is text, and not as long as that")
    return Edited(content=new, said=numbered(new_lines, first=first) or "deleted")
