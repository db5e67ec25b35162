"""The pages of the shop: the links on each, the page that an action leads to, and the text of a page."""

import re

import msgspec
from msgspec.structs import replace

from slipstream.envhub.shop.products import Product, Store

BACK = "back to search"
PREVIOUS = "< prev"
NEXT = "next >"
BUY = "buy now"

MAX_RESULTS = 50
SEPARATOR = " [SEP] "

# White space is allowed everywhere, because some tokenizers put spaces around brackets.
_ACTION = re.compile(r"\s*(search|click)\s*\[([^\[\]]*)\]\s*", re.IGNORECASE)


class Page(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The page that the customer sees. Unused fields have their defaults, so that equal pages are equal values."""

    results: tuple[int, ...] | None = None  # positions of the products found; None before a search
    first: int = 0  # index of the first result on the page of results
    product: int | None = None  # position of the product shown
    section: str = ""  # the section of that product shown
    options: dict[str, str] = {}  # the values chosen for that product
    bought: bool = False


def clickables(store: Store, page: Page, *, page_size: int) -> list[str]:
    """Return everything that `click[...]` accepts, in lower case."""
    if page.bought or page.results is None:
        return []
    if page.product is None:
        ids = [store.products[position].product_id for position in page.results[page.first : page.first + page_size]]
        more = [NEXT] if page.first + page_size < len(page.results) else []
        return [BACK, *([PREVIOUS] if page.first else []), *more, *ids]
    if page.section:
        return [BACK, PREVIOUS]
    product = store.products[page.product]
    values = [value for offered in product.options.values() for value in offered]
    return [BACK, PREVIOUS, *values, *product.sections, BUY]


def next_page(store: Store, page: Page, action: str, *, page_size: int, ranked: bool) -> Page | None:
    """Return the page that `action` leads to; None if the action is invalid.

    Results are sorted best first if `ranked`, else by their position in the catalogue.
    """
    found = _ACTION.fullmatch(action)
    if found is None:
        return None
    verb, argument = found[1].lower(), " ".join(found[2].lower().split())
    if verb == "search":
        if page.results is not None or not argument:
            return None
        results = store.index.rank(argument)[: MAX_RESULTS if ranked else page_size]
        return Page(results=tuple(results if ranked else sorted(results)))
    if argument not in clickables(store, page, page_size=page_size):
        return None
    return _clicked(store, page, argument, page_size=page_size)


def _clicked(store: Store, page: Page, target: str, *, page_size: int) -> Page:
    if target == BACK:
        return Page()
    if page.product is None:
        if target in (PREVIOUS, NEXT):
            return replace(page, first=page.first + (page_size if target == NEXT else -page_size))
        return replace(page, product=store.position_of(target))
    if target == PREVIOUS:
        return replace(page, section="") if page.section else replace(page, product=None, options={})
    if target == BUY:
        return replace(page, bought=True)
    product = store.products[page.product]
    option = product.option_of(target)
    if option is None:
        return replace(page, section=target)
    # In the order of the product's options, so that the order of clicks does not matter.
    chosen = {**page.options, option: target}
    return replace(page, options={name: chosen[name] for name in product.options if name in chosen})


def terse_text(store: Store, page: Page, page_size: int) -> str:
    """Return the text of the page in as few words as possible: no links, product codes, and only the chosen values."""
    if page.bought:
        return "bought"
    if page.results is None:
        return "search"
    if page.product is None:
        shown = [store.products[position] for position in page.results[page.first : page.first + page_size]]
        return SEPARATOR.join(product.product_id for product in shown) or "no results"
    if page.options:
        return SEPARATOR.join(f"{option} {value}" for option, value in page.options.items())
    product = store.products[page.product]
    offers = [f"{option} {' '.join(values)}" for option, values in product.options.items()]
    return SEPARATOR.join([product.product_id, *offers, BUY])


def webshop_text(store: Store, page: Page, page_size: int) -> str:
    """Return the text of the page as in WebShop, without the instruction, which is already in the conversation."""
    if page.bought:
        return "Thank you for shopping with us!"
    if page.results is None:
        return "WebShop [SEP] Search"
    if page.product is None:
        return SEPARATOR.join(_result_lines(store, page, page_size=page_size))
    product = store.products[page.product]
    if page.section:
        return SEPARATOR.join(["Back to Search", "< Prev", product.sections[page.section]])
    return SEPARATOR.join(_product_lines(product, page.options))


def _result_lines(store: Store, page: Page, *, page_size: int) -> list[str]:
    assert page.results is not None
    number = page.first // page_size + 1
    lines = ["Back to Search", f"Page {number} (Total results: {len(page.results)})"]
    lines += ["< Prev"] if page.first else []
    lines += ["Next >"] if page.first + page_size < len(page.results) else []
    for position in page.results[page.first : page.first + page_size]:
        product = store.products[position]
        lines += [product.product_id.upper(), product.title, f"${product.price:.2f}"]
    return lines


def _product_lines(product: Product, chosen: dict[str, str]) -> list[str]:
    lines = ["Back to Search", "< Prev"]
    for option, values in product.options.items():
        lines += [option, *(f"{value} (chosen)" if chosen.get(option) == value else value for value in values)]
    sections = [section.capitalize() for section in product.sections]
    return [*lines, product.title, f"Price: ${product.price:.2f}", *sections, "Buy Now"]
