"""Shows files with line numbers, and edits them by line numbers."""

import re
from dataclasses import dataclass

from slipstream.envhub.isolation.file_tree import Node
from slipstream.envhub.world import InvalidAction

MAX_SHOWN_CHARS = 30_000  # of a file or a diff: a command may make files of some MB

_FENCED = re.compile(r"\n```(?:\w*)[ \t]*\n(.*?)```\s*", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Edited:
    content: str
    text: str  # for the policy: the new lines


def text_of(node: Node | None) -> str | None:
    """Return the content of a text file; None if `node` is not one."""
    try:
        return None if node is None or node.kind != "file" else node.content.decode()
    except UnicodeDecodeError:
        return None


def lines_of(content: str) -> list[str]:
    """Return the lines of `content`, split at newlines only. `str.splitlines` also splits at other characters."""
    lines = content.split("\n")
    return lines if lines[-1] else lines[:-1]


def numbered(lines: list[str], *, first: int) -> str:
    return cut("\n".join(f"{number} {line}".rstrip() for number, line in enumerate(lines, first)))


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}\n[cut]"


def edited(path: str, content: str, found: re.Match[str], *, max_chars: int) -> Edited:
    """Do the edit that was parsed as the groups `first`, `last` and `text`.

    The lines `first` to `last` of `content` are replaced by those of `text`, which may be a fenced block. If `last` is
    `first - 1`, the new lines are inserted before `first`. An empty `text` deletes the lines.
    Raises InvalidAction.
    """
    lines, first, text = lines_of(content), int(found["first"]), found["text"] or ""
    last = int(found["last"] or first)
    if not (1 <= first <= len(lines) + 1 and first - 1 <= last <= len(lines)):
        raise InvalidAction(f"{path} has the lines 1 to {len(lines)}")
    fenced = _FENCED.fullmatch(text)
    new_lines = lines_of(fenced[1] if fenced else text.removeprefix("\n").rstrip())
    new = "".join(f"{line}\n" for line in (*lines[: first - 1], *new_lines, *lines[last:]))
    if len(new) > max_chars or new.encode(errors="replace").decode() != new:
        raise InvalidAction(f"a file must be valid text of at most {max_chars} characters")
    return Edited(content=new, text=numbered(new_lines, first=first) or "deleted")
