"""A text browser: it shows HTML as lines with numbered links, fields and buttons, and fills in forms."""

from html.parser import HTMLParser

import msgspec

EMPTY = "_"  # what an empty field shows


class Element(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link, field, choice or button. Its number is its position on the page, from 1."""

    kind: str  # "link", "field", "choice" or "button"
    label: str
    target: str = ""  # of a link
    form: int = 0  # the position of its form on the page
    value: str = ""  # of a field or choice: the value in the page
    options: tuple[str, ...] = ()  # of a choice


class Form(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    method: str
    action: str
    hidden: dict[str, str]


class Page(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = ""  # with its query; "" before the first page
    lines: tuple[tuple[str | int, ...], ...] = ()  # a str is text, an int is the number of an element
    elements: tuple[Element, ...] = ()
    forms: tuple[Form, ...] = ()


class Browser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of a browser between two actions."""

    page: Page = Page()
    typed: dict[str, str] = {}  # number of a field -> its value, if that differs from the page's
    cookie: str = ""
    previous: str = ""  # the path of the previous page; the browser can go back one page


def filled(browser: Browser, form: int) -> dict[str, str]:
    """Return the current values of the fields of a form."""
    fields = {
        element.label: browser.typed.get(str(number), element.value)
        for number, element in enumerate(browser.page.elements, 1)
        if element.form == form and element.kind in ("field", "choice")
    }
    return browser.page.forms[form].hidden | fields


def page_text(browser: Browser) -> str:
    """Return the page as lines: `[1] home` is a link, `[2] name = ada` a field, `[3] (send)` a button."""
    page = browser.page
    lines = [" ".join(p if isinstance(p, str) else element_text(browser, p) for p in line) for line in page.lines]
    return "\n".join([page.path, *lines])


def element_text(browser: Browser, number: int) -> str:
    element = browser.page.elements[number - 1]
    value = browser.typed.get(str(number), element.value)
    if element.kind == "choice":
        return f"[{number}] {element.label} = {value} of {' '.join(element.options)}"
    if element.kind == "field":
        return f"[{number}] {element.label} = {value or EMPTY}"
    return f"[{number}] ({element.label})" if element.kind == "button" else f"[{number}] {element.label}"


def read_page(path: str, body: str) -> Page:
    reader = _Reader()
    reader.feed(body)
    reader.close()
    lines = tuple(tuple(line) for line in reader.lines if line)
    return Page(path=path, lines=lines, elements=tuple(reader.elements), forms=tuple(reader.forms))


class _Reader(HTMLParser):
    """Parses HTML: blocks become lines; text, links, inputs, selects and buttons are kept, all else is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[list[str | int]] = [[]]
        self.elements: list[Element] = []
        self.forms: list[Form] = []
        self._open: dict[str, str] | None = None  # attributes of the open link, button, select or title
        self._words: list[str] = []  # the text in it

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in ("p", "form", "div", "li"):
            self.lines.append([])
        if tag == "form":
            self.forms.append(Form(method=values.get("method", "get"), action=values.get("action", ""), hidden={}))
        elif tag in ("a", "button", "select", "title"):
            self._open, self._words = values, []
        elif tag == "input" and values.get("type") == "hidden":
            self.forms[-1].hidden[values["name"]] = values.get("value", "")
        elif tag == "input":
            self._add(Element(kind="field", label=values["name"], value=values.get("value", ""), form=self._form))

    def handle_endtag(self, tag: str) -> None:
        if self._open is None or tag not in ("a", "button", "select", "title"):
            return
        label = " ".join(" ".join(self._words).split())
        if tag == "a":
            self._add(Element(kind="link", label=label, target=self._open["href"]))
        elif tag == "button":
            self._add(Element(kind="button", label=label, form=self._form))
        elif tag == "select":
            options = tuple(self._words)
            self._add(
                Element(kind="choice", label=self._open["name"], value=options[0], options=options, form=self._form)
            )
        self._open = None

    def handle_data(self, data: str) -> None:
        text = " ".join(data.split())
        if text:
            (self.lines[-1] if self._open is None else self._words).append(text)

    @property
    def _form(self) -> int:
        return len(self.forms) - 1

    def _add(self, element: Element) -> None:
        self.elements.append(element)
        self.lines[-1].append(len(self.elements))
