"""Errands on a market's site: what the site holds at first, what is asked, and what it should hold then."""

import random
from dataclasses import dataclass

import msgspec

from envhub.web.site import FIRST_ORDER, MAX_COUNT, Order, Site, SiteState, in_order, next_number

COLOURS = ("black", "blue", "brown", "green", "grey", "orange", "pink", "red", "white", "yellow")
THINGS = ("bag", "bench", "bowl", "chair", "clock", "coat", "drum", "hat", "kettle", "lamp", "rug", "vase")
MAKERS = ("alder", "birch", "cedar", "hazel", "maple", "rowan")
PEOPLE = ("ada", "ben", "cleo", "dora", "emil", "fay", "gus", "hana", "igor", "june", "kai", "lena")
PASSWORDS = ("anchor", "button", "candle", "dragon", "feather", "guitar", "hammer", "island", "jacket", "ladder",
             "magnet", "needle", "oyster", "pepper", "ribbon", "saddle")  # fmt: skip
CITIES = ("arden", "corby", "dover", "elgin", "irvine", "kelso", "malton", "oakham", "ripley", "selby")
WORDS = ("apples", "bring", "come", "dinner", "early", "friday", "garden", "late", "monday", "music", "noon", "soon",
         "tea", "tickets", "today", "tomorrow")  # fmt: skip
ERRANDS = ("order", "cancel", "change", "write")
PHONES = range(1000, 10000, 100)  # few, so that a small vocabulary holds them all
NUM_ORDERS = 6  # that are there at first
FIRST_NEW = FIRST_ORDER + NUM_ORDERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    text: str
    goal: SiteState  # what the site holds when it is done
    types: tuple[str, ...]  # what one may have to type for it
    secret: str = ""  # what must be found on the site


def draw_site(rng: random.Random, *, num_items: int) -> Site:
    """Items in no order, many of them alike but for their makers; no two prices are the same."""
    things = rng.sample([f"{colour} {thing}" for colour in COLOURS for thing in THINGS], -(-num_items // 4))
    chosen = rng.sample([f"{thing} {maker}" for thing in things for maker in MAKERS], num_items)
    prices = rng.sample(range(10, 100), len(chosen))
    name, *people = rng.sample(PEOPLE, 5)
    return Site(items=dict(zip(chosen, prices, strict=True)), people=tuple(people), name=name,
                password=rng.choice(PASSWORDS))  # fmt: skip


def draw_state(rng: random.Random, site: Site) -> SiteState:
    """With orders of different items, on more than one page."""
    items = rng.sample(list(site.items), NUM_ORDERS)
    numbers = map(str, range(FIRST_ORDER, FIRST_NEW))
    orders = {n: Order(item=item, count=rng.randint(1, MAX_COUNT)) for n, item in zip(numbers, items, strict=True)}
    account = {"city": rng.choice(CITIES), "phone": str(rng.choice(PHONES))}
    return SiteState(orders=orders, account=account)


def draw_errand(rng: random.Random, site: Site, state: SiteState, *, kind: str) -> Errand:
    """An errand for who finds the site in `state`."""
    if kind == "order":
        return _order(rng, site, state)
    if kind == "cancel":
        number = rng.choice([number for number in in_order(state) if int(number) < FIRST_NEW])
        orders = {other: order for other, order in state.orders.items() if other != number}
        return Errand(
            text=f"cancel the order of the {state.orders[number].item}",
            goal=msgspec.structs.replace(state, orders=orders),
            types=(),
            secret=f"order {number}",
        )
    if kind == "change":
        field = rng.choice(sorted(state.account))
        others = CITIES if field == "city" else tuple(map(str, PHONES))
        value = rng.choice([other for other in others if other != state.account[field]])
        return Errand(
            text=f"change the {field} of your account to {value}",
            goal=msgspec.structs.replace(state, account={**state.account, field: value}),
            types=(value,),
        )
    person, text = rng.choice(site.people), " ".join(rng.sample(WORDS, 3))
    return Errand(
        text=f"write to {person} : {text}",
        goal=msgspec.structs.replace(state, messages=(*state.messages, (person, text))),
        types=(text,),
    )


def _order(rng: random.Random, site: Site, state: SiteState) -> Errand:
    """Of an item told by its maker, or by its price among those of other makers."""
    ordered = {order.item for order in state.orders.values()}
    title = rng.choice([title for title in site.items if title not in ordered])
    count = rng.randint(1, MAX_COUNT)
    thing = title.rpartition(" ")[0]
    by_price = rng.random() < 0.5
    told = f"{thing} that costs {site.items[title]}" if by_price else title
    return Errand(
        text=f"order {count} of the {told}",
        goal=msgspec.structs.replace(
            state, orders={**state.orders, next_number(state): Order(item=title, count=count)}
        ),
        types=(thing if by_price else title,),
        secret=title if by_price else "",
    )
