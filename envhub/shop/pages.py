"""The shop's pages: which one is shown, what can be clicked on it, where an action leads, and how it reads."""

import re

import msgspec
from msgspec.structs import replace

from envhub.shop.catalogue import Product, Store

BACK = "back to search"
PREVIOUS = "< prev"
NEXT = "next >"
BUY = "buy now"

MAX_RESULTS = 50
SEPARATOR = " [SEP] "

# White space is free, so that a tokenizer which puts spaces around brackets can still be understood.
_ACTION = re.compile(r"\s*(search|click)\s*\[([^\[\]]*)\]\s*", re.IGNORECASE)


class Page(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the customer is. What is not shown is empty, so that equal pages are equal values."""

    results: tuple[int, ...] | None = None  # positions of the products found; None before a search
    first: int = 0  # the result that the page of results begins with
    product: int | None = None  # position of the product looked at
    section: str = ""  # the further page of that product
    options: dict[str, str] = {}  # chosen for that product
    bought: bool = False


def clickables(store: Store, page: Page, *, page_size: int) -> list[str]:
    """What `click[...]` takes, in lower case."""
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
    """The page that `action` leads to; None where it makes no sense.

    Results come best first where `ranked`, else in the catalogue's order.
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
        return replace(page, product=position_of(store, target))
    if target == PREVIOUS:
        return replace(page, section="") if page.section else replace(page, product=None, options={})
    if target == BUY:
        return replace(page, bought=True)
    product = store.products[page.product]
    option = product.option_of(target)
    if option is None:
        return replace(page, section=target)
    # In the product's own order, so that the order of clicks leaves no trace.
    chosen = {**page.options, option: target}
    return replace(page, options={name: chosen[name] for name in product.options if name in chosen})


def position_of(store: Store, product_id: str) -> int:
    """Where in the catalogue `product_id` stands. Raises ValueError where it does not."""
    return [product.product_id for product in store.products].index(product_id)


def terse_text(store: Store, page: Page, *, page_size: int) -> str:
    """The page in as few words as a policy can do with: no chrome, codes that say it all, and only choices made."""
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


def webshop_text(store: Store, page: Page, *, page_size: int) -> str:
    """The page as WebShop's text environment shows it, without the instruction, which the conversation still holds."""
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
