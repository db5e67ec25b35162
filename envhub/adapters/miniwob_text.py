"""MiniWoB++ as text: a page as its numbered elements, one a line, and the actions on them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

MAX_PAGE_CHARS = 8000
MAX_TYPED_CHARS = 200
RULES = """\
You use a web page. It is shown as its elements, one a line: a number, the kind, and what stands in it. An element in
another is indented; (now "...") is what is filled in, (on) what is ticked, (focused) where keys go. Do one of:
click NUMBER
type NUMBER TEXT: clicks it, then types TEXT as it stands, without quotes around it
press KEY: <Enter>, <Tab>, <Backspace>, <Delete>, <Space>, <ArrowUp>, <ArrowDown>, <ArrowLeft>, <ArrowRight>, a letter
or digit, C-a, C-c, C-x or C-v
wait: half a second passes, as it does after everything else"""

_ACTION = re.compile(
    r"\s*(?:(?P<click>click)\s+\[?(?P<clicked>\d{1,6})\]?|(?P<type>type)\s+\[?(?P<typed>\d{1,6})\]?[ \t](?P<text>.+)"
    r"|(?P<press>press)\s+(?P<key>\S+)|(?P<wait>wait))\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageAction:
    """A parsed action, with the element and the text that some kinds have."""

    kind: Literal["click", "type", "press", "wait"]
    ref: int = 0
    text: str = ""


def parse_action(action: str, refs: set[int], keys: set[str]) -> PageAction | None:
    """Parse an action on a page that shows the elements `refs`; None if it is not valid there."""
    found = _ACTION.fullmatch(action)
    if found is None:
        return None
    if found["wait"]:
        return PageAction(kind="wait")
    if found["press"]:
        return PageAction(kind="press", text=found["key"]) if found["key"] in keys else None
    ref = int(found["clicked"] or found["typed"])
    if ref not in refs:
        return None
    if found["click"]:
        return PageAction(kind="click", ref=ref)
    text = found["text"].strip()
    return PageAction(kind="type", ref=ref, text=text) if _can_be_typed(text) else None


def page_text(body: Any) -> str:
    """Return the elements below `body`, a `miniwob.dom.DOMElement`, as text."""
    text = "\n".join(line for element in body.children for line in _lines(element, 0)) or "(an empty page)"
    return text if len(text) <= MAX_PAGE_CHARS else f"{text[:MAX_PAGE_CHARS]}\n[cut]"


def shown_refs(body: Any) -> set[int]:
    """Return the numbers of the elements that can be clicked. Texts have negative numbers, which change every turn."""
    return {element.ref for element in body.subtree_elements if element.ref > 0}


def _can_be_typed(text: str) -> bool:
    # chromedriver cannot type characters beyond Unicode's basic plane. WebDriver's special keys are not printable.
    return 0 < len(text) <= MAX_TYPED_CHARS and text.isprintable() and max(text) < "\U00010000"


def _lines(element: Any, depth: int) -> Iterator[str]:
    yield " " * depth + _line(element)
    texts: list[str] = []
    for child in element.children:
        if child.tag == "t":  # one line on the screen; joined, because line breaks depend on the font
            texts.append(child.text)
            continue
        if texts:
            yield " " * (depth + 1) + _quoted(" ".join(texts))
            texts = []
        yield from _lines(child, depth + 1)
    if texts:
        yield " " * (depth + 1) + _quoted(" ".join(texts))


def _line(element: Any) -> str:
    words = [f"[{element.ref}]", _kind(element)]
    if element.text:
        words.append(_quoted(element.text))
    if element.value is True:
        words.append("(on)")
    elif element.value:
        words.append(f"(now {_quoted(str(element.value))})")
    if element.focused:
        words.append("(focused)")
    return " ".join(words)


def _kind(element: Any) -> str:
    """Return the tag with id and classes, because icons have no other description."""
    name = f"{element.tag}#{element.id}" if element.id else str(element.tag)
    return ".".join([name, *str(element.classes).split()])


def _quoted(text: str) -> str:
    return '"' + " ".join(text.split()) + '"'
