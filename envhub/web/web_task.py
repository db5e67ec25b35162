"""Draws the site of a market and the errands on it: each with its text and the state that the site should reach."""

import random
from dataclasses import dataclass

import msgspec

from slipstream.envhub.name_list import name_list
from slipstream.envhub.web.site import FIRST_ORDER, MAX_COUNT, ItemOrder, Site, SiteState, in_order, next_number

COLOURS = ("black", "blue", "brown", "green", "grey", "orange", "pink", "red", "white", "yellow")
THINGS = ("bag", "bench", "bowl", "chair", "clock", "coat", "drum", "hat", "kettle", "lamp", "rug", "vase")
MAKERS = ("alder", "birch", "cedar", "hazel", "maple", "rowan")
PEOPLE = ("ada", "ben", "cleo", "dora", "emil", "fay", "gus", "hana", "igor", "june", "kai", "lena")
PASSWORDS = name_list(
    """
    anchor, button, candle, dragon, feather, guitar, hammer, island, jacket, ladder, magnet, needle, oyster,
    pepper, ribbon, saddle
    """
)
CITIES = ("arden", "corby", "dover", "elgin", "irvine", "kelso", "malton", "oakham", "ripley", "selby")
WORDS = name_list(
    """
    apples, bring, come, dinner, early, friday, garden, late, monday, music, noon, soon, tea, tickets, today,
    tomorrow
    """
)
ERRANDS = ("order", "cancel", "change", "write")
PHONES = range(1000, 10000, 100)  # few, so that a small vocabulary contains all of them
NUM_ITEMS = 24
NUM_ORDERS = 6  # at the start
FIRST_NEW = FIRST_ORDER + NUM_ORDERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    text: str
    goal: SiteState  # the state of the site after this errand
    types: tuple[str, ...] = ()  # the texts that a policy may have to type
    secret: str = ""  # what a policy must find on the site; "" if there is nothing to find


def draw_site(rng: random.Random) -> Site:
    """Return a site with items in random order. Many differ only in their maker. All prices differ."""
    things = rng.sample([f"{colour} {thing}" for colour in COLOURS for thing in THINGS], NUM_ITEMS // 4)
    chosen = rng.sample([f"{thing} {maker}" for thing in things for maker in MAKERS], NUM_ITEMS)
    prices = rng.sample(range(10, 100), len(chosen))
    name, *people = rng.sample(PEOPLE, 5)
    items = dict(zip(chosen, prices, strict=True))
    return Site(items=items, people=tuple(people), name=name, password=rng.choice(PASSWORDS))


def draw_state(rng: random.Random, site: Site) -> SiteState:
    """Return a state with orders of different items, enough for more than one page."""
    items = rng.sample(list(site.items), NUM_ORDERS)
    numbers = map(str, range(FIRST_ORDER, FIRST_NEW))
    orders = {n: ItemOrder(item=item, count=rng.randint(1, MAX_COUNT)) for n, item in zip(numbers, items, strict=True)}
    account = {"city": rng.choice(CITIES), "phone": str(rng.choice(PHONES))}
    return SiteState(orders=orders, account=account)


def draw_errand(rng: random.Random, site: Site, state: SiteState, *, kind: str) -> Errand:
    if kind == "order":
        return _order(rng, site, state)
    if kind == "cancel":
        number = rng.choice([number for number in in_order(state) if int(number) < FIRST_NEW])
        orders = {other: order for other, order in state.orders.items() if other != number}
        return Errand(
            text=f"cancel the order of the {state.orders[number].item}",
            goal=msgspec.structs.replace(state, orders=orders),
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
    """Return an errand to order an item. Its text names the maker, or else the price, which differs between makers."""
    ordered = {order.item for order in state.orders.values()}
    title = rng.choice([title for title in site.items if title not in ordered])
    count = rng.randint(1, MAX_COUNT)
    orders = {**state.orders, next_number(state): ItemOrder(item=title, count=count)}
    thing = title.rpartition(" ")[0]
    by_price = rng.random() < 0.5
    description = f"{thing} that costs {site.items[title]}" if by_price else title
    return Errand(
        text=f"order {count} of the {description}",
        goal=msgspec.structs.replace(state, orders=orders),
        types=(thing if by_price else title,),
        secret=title if by_price else "",
    )
