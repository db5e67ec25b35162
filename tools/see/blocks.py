"""The parts of a report, and how they are written as Markdown and as HTML. All text is escaped here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from slipstream.common.process.printable import printable

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&$])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """A paragraph."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A table."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A drawing of ours, whose SVG is escaped already, with the question that it answers."""

    name: str  # of its file, without the ending
    question: str
    svg: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """Commands for a terminal."""

    lines: Sequence[str]


Block = Words | Rows | Chart | Commands


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading and what is under it."""

    title: str
    blocks: Sequence[Block]


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The report as Markdown, whose charts are files beside it."""
    parts = [f"# {_marked(title)}"]
    for section in sections:
        parts += [f"## {_marked(section.title)}", *map(_markdown, section.blocks)]
    return "\n\n".join(parts) + "\n"


def html(sections: Sequence[Section]) -> str:
    """The sections as the body of an HTML page, charts included."""
    parts = []
    for section in sections:
        parts += [f"<h2>{_escaped(section.title)}</h2>", *map(_html, section.blocks)]
    return "\n".join(parts) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Words(text=text):
            return _marked(text)
        case Rows(head=head, rows=rows):
            lines = [head, ["---"] * len(head), *rows]
            return "\n".join(
                f"| {' | '.join(cell if cell == '---' else _marked(cell) for cell in line)} |" for line in lines
            )
        case Chart(name=name, question=question):
            return f"{_marked(question)}\n\n![{_marked(question)}]({name}.svg)"
        case Commands(lines=lines):
            return "\n".join(["```text", *map(printable, lines), "```"])


def _html(block: Block) -> str:
    match block:
        case Words(text=text):
            return f"<p>{_escaped(text)}</p>"
        case Rows(head=head, rows=rows):
            top = "".join(f"<th>{_escaped(cell)}</th>" for cell in head)
            body = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
            return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
        case Chart(question=question, svg=svg):
            return f"<figure><figcaption>{_escaped(question)}</figcaption>{svg}</figure>"
        case Commands(lines=lines):
            return f"<pre>{escape(chr(10).join(map(printable, lines)))}</pre>"


def _marked(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", printable(text))


def _escaped(text: str) -> str:
    return escape(printable(text))
