"""MiniWoB++ in words: a page as its numbered elements, one a line, and what may be done with them."""

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
class Deed:
    """An action that was understood: an element and a text, as far as it has them."""

    kind: Literal["click", "type", "press", "wait"]
    ref: int = 0
    text: str = ""


def parse_action(action: str, refs: set[int], keys: set[str]) -> Deed | None:
    """What is to be done on a page that shows `refs`; None for what makes no sense there."""
    found = _ACTION.fullmatch(action)
    if found is None:
        return None
    if found["wait"]:
        return Deed(kind="wait")
    if found["press"]:
        return Deed(kind="press", text=found["key"]) if found["key"] in keys else None
    ref = int(found["clicked"] or found["typed"])
    if ref not in refs:
        return None
    if found["click"]:
        return Deed(kind="click", ref=ref)
    text = found["text"].strip()
    return Deed(kind="type", ref=ref, text=text) if _can_be_typed(text) else None


def page_text(body: Any) -> str:
    """The elements below `body`, a `miniwob.dom.DOMElement`."""
    text = "\n".join(line for element in body.children for line in _lines(element, 0)) or "(an empty page)"
    return text if len(text) <= MAX_PAGE_CHARS else f"{text[:MAX_PAGE_CHARS]}\n[cut]"


def shown_refs(body: Any) -> set[int]:
    """The numbers of the elements that can be clicked: those of texts are below 0, and change all the time."""
    return {element.ref for element in body.subtree_elements if element.ref > 0}


def _can_be_typed(text: str) -> bool:
    # Beyond the basic plane a character is two, and chromedriver has keys of one; WebDriver's own keys do not print.
    return 0 < len(text) <= MAX_TYPED_CHARS and text.isprintable() and max(text) < "\U00010000"


def _lines(element: Any, depth: int) -> Iterator[str]:
    yield " " * depth + _line(element)
    texts: list[str] = []
    for child in element.children:
        if child.tag == "t":  # one line of text on the screen, which another font would break elsewhere
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
    """The tag, and id and classes: icons have nothing else that tells what they are."""
    name = f"{element.tag}#{element.id}" if element.id else str(element.tag)
    return ".".join([name, *str(element.classes).split()])


def _quoted(text: str) -> str:
    return '"' + " ".join(text.split()) + '"'
