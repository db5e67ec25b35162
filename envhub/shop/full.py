"""Draws the catalogue of the full profile: 200 products in four departments, with more pages and hidden attributes.

The title of a product names two of its attributes. The others are in its features and description. An eighth of the
catalogue differs from the goal in one thing each; half of these differ in something that the results do not show.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from slipstream.common.records.trajectory import Task
from slipstream.envhub.bm25 import Bm25
from slipstream.envhub.name_list import name_list
from slipstream.envhub.shop.products import Goal, Kind, Product, Store
from slipstream.envhub.task_seed import split_of, task_rng

NUM_PRODUCTS = 200
NUM_NEAR = 24
NUM_TITLE_ATTRIBUTES = 2
NUM_ATTRIBUTES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Department:
    """Kinds of products that share attributes, options and brands."""

    kinds: tuple[Kind, ...]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    brands: tuple[str, ...]
    max_cents: int


def _kinds(department: str, shelves: dict[str, tuple[str, ...]]) -> tuple[Kind, ...]:
    return tuple(
        Kind(name=name, category=(department, shelf, name)) for shelf, names in shelves.items() for name in names
    )


COLORS = ("red", "navy", "forest green", "black", "ivory", "grey", "coral", "mustard", "teal", "brown")

DEPARTMENTS = (
    Department(
        kinds=_kinds(
            "fashion",
            {
                "shoes": ("running shoe", "hiking boot", "ankle boot", "canvas shoe"),
                "outerwear": ("rain jacket", "denim jacket", "wool coat", "fleece vest"),
                "accessories": ("leather belt", "wool scarf", "sun hat", "travel wallet"),
            },
        ),
        attributes=name_list(
            """
            machine wash, water resistant, slim fit, lightweight, breathable, non slip, arch support,
            quick drying, hand made, stretch fabric, rubber sole, long lasting, easy care, vegan
            """
        ),
        options={
            "color": COLORS,
            "size": ("x-small", "small", "medium", "large", "x-large"),
            "fit": ("regular", "narrow", "wide"),
            "pattern": ("solid", "striped", "plaid", "dotted"),
        },
        brands=("Aldermoor", "Northbay", "Tessaly", "Wickerson", "Oakline"),
        max_cents=18_000,
    ),
    Department(
        kinds=_kinds(
            "home",
            {
                "lighting": ("desk lamp", "floor lamp", "wall light", "string light"),
                "furniture": ("coffee table", "side table", "office chair", "storage bench"),
                "bedding": ("pillow cover", "duvet cover", "throw blanket", "bed sheet"),
            },
        ),
        attributes=name_list(
            """
            easy assemble, space saving, solid wood, stainless steel, dimmable, super soft, fade proof,
            memory foam, eco friendly, heavy duty, wall mounted, easy clean, hypoallergenic, foldable
            """
        ),
        options={
            "color": COLORS,
            "finish": ("matte", "glossy", "brushed", "rustic"),
            "pack": ("single", "pair", "set of four"),
            "width": ("40 cm", "60 cm", "90 cm"),
        },
        brands=("Hearthly", "Lumenor", "Fennick", "Casa Brill", "Dovetail"),
        max_cents=40_000,
    ),
    Department(
        kinds=_kinds(
            "electronics",
            {
                "audio": ("bluetooth speaker", "wireless headphone", "radio clock", "soundbar speaker"),
                "accessories": ("phone case", "phone charger", "tablet stand", "laptop sleeve"),
                "cameras": ("action camera", "camera tripod", "security camera", "camera bag"),
            },
        ),
        attributes=name_list(
            """
            fast charging, noise cancelling, water proof, shock proof, hands free, high definition,
            long battery life, plug and play, carbon fiber, night vision, ultra thin, stereo sound,
            easy install, scratch resistant
            """
        ),
        options={
            "color": COLORS,
            "storage": ("32 gb", "64 gb", "128 gb"),
            "cable": ("one meter", "two meters", "three meters"),
            "edition": ("standard", "travel", "studio"),
        },
        brands=("Voltera", "Pixmere", "Sonarch", "Brightkey", "Ampere & Co"),
        max_cents=30_000,
    ),
    Department(
        kinds=_kinds(
            "grocery",
            {
                "snacks": ("trail mix", "protein bar", "granola bar", "rice cracker"),
                "drinks": ("green tea", "herbal tea", "coffee bean", "cocoa powder"),
                "care": ("hand cream", "face cream", "shampoo bar", "bath salt"),
            },
        ),
        attributes=name_list(
            """
            gluten free, sugar free, non gmo, dairy free, low sodium, fair trade, plant based, cruelty free,
            high protein, caffeine free, keto friendly, paraben free, organic, kosher
            """
        ),
        options={
            "flavor": ("vanilla", "lemon", "mint", "berry", "ginger", "almond", "honey"),
            "weight": ("100 g", "250 g", "500 g", "1 kg"),
            "pack": ("single", "pair", "box of six"),
            "box": ("plain box", "gift box"),
        },
        brands=("Meadowlark", "Grovely", "Sunmill", "Pure Acre", "Kettle & Fern"),
        max_cents=6_000,
    ),
)

TEMPLATES = (
    "Find me {attributes} {kind} with {options}, and price lower than {price} dollars",
    "I am looking for a {kind} that is {attributes}, with {options}, and price lower than {price} dollars",
    "I need a {attributes} {kind}. Please choose {options}. It should cost less than {price} dollars",
    "Buy a {kind} for me: {attributes}, {options}, under {price} dollars",
)

REVIEWS = name_list(
    """
    does what it says, arrived early and well packed, a gift that was liked, smaller than I thought,
    would buy it again, good value, my second one, the colour is as shown
    """
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wish:
    """The goal's product. Similar products are made by changing one thing in it."""

    department: Department
    kind: Kind
    attributes: tuple[str, ...]  # the first NUM_TITLE_ATTRIBUTES are in the title
    requested: tuple[str, ...]  # the attributes in the instruction; at least one is not in the title
    offers: dict[str, tuple[str, ...]]  # option -> its values
    chosen: dict[str, str]  # option -> the value in the instruction
    cents: int
    max_price: int  # dollars


@lru_cache(maxsize=16)  # siblings play the same task at about the same time
def make_full_store(task: Task) -> Store:
    rng = task_rng(task, world="shop/full")
    wish, instruction = _draw_wish(rng)
    while split_of(instruction) != task.split:
        wish, instruction = _draw_wish(rng)
    ids = _product_ids(rng)
    products = [_product(rng, ids[0], wish.department, wish.kind, wish.attributes, wish.offers, wish.cents)]
    products += [rng.choice(_DIFFERENCES)(rng, wish, product_id) for product_id in ids[1 : 1 + NUM_NEAR]]
    products += [_unrelated(rng, product_id) for product_id in ids[1 + NUM_NEAR :]]
    products.sort(key=lambda product: product.product_id)
    return Store(
        products=tuple(products),
        index=Bm25([f"{product.title} {' '.join(product.sections.values())}" for product in products]),
        goal=Goal(
            kind=wish.kind,
            attributes=frozenset(wish.requested),
            options=wish.chosen,
            max_price=wish.max_price,
            product_id=ids[0],
        ),
        instruction=instruction,
        searches=_searches(wish),
    )


def _draw_wish(rng: random.Random) -> tuple[_Wish, str]:
    """Return a wish and the instruction that describes it."""
    department = rng.choice(DEPARTMENTS)
    attributes = rng.sample(department.attributes, NUM_ATTRIBUTES)
    hidden = attributes[NUM_TITLE_ATTRIBUTES:]
    offers = _draw_offers(rng, department)
    cents = rng.randrange(500, department.max_cents // 2)
    wish = _Wish(
        department=department,
        kind=rng.choice(department.kinds),
        attributes=tuple(attributes),
        requested=(rng.choice(attributes[:NUM_TITLE_ATTRIBUTES]), *rng.sample(hidden, rng.choice((1, 2)))),
        offers=offers,
        chosen={option: rng.choice(values) for option, values in offers.items()},
        cents=cents,
        max_price=10 * (cents // 1000 + rng.randrange(1, 5)),
    )
    instruction = rng.choice(TEMPLATES).format(
        kind=wish.kind.name,
        attributes=", ".join(wish.requested),
        options=", and ".join(f"{option}: {value}" for option, value in wish.chosen.items()),
        price=f"{wish.max_price:.2f}",
    )
    return wish, instruction


def _searches(wish: _Wish) -> tuple[str, ...]:
    """Return the queries that customers may type, from the best to a useless one."""
    kind = wish.kind.name
    other_kind = next(other.name for other in wish.department.kinds if other != wish.kind)
    return (
        f"{' '.join(wish.requested)} {kind}",
        f"{wish.requested[0]} {kind}",
        kind,
        f"{' '.join(wish.chosen.values())} {kind}",
        other_kind,
    )


def _draw_offers(rng: random.Random, department: Department) -> dict[str, tuple[str, ...]]:
    """Return three options with two to four values each, in the order of the department."""
    names = set(rng.sample(list(department.options), 3))
    offers = {}
    for name, values in department.options.items():
        if name in names:
            kept = set(rng.sample(values, min(rng.randrange(2, 5), len(values))))
            offers[name] = tuple(value for value in values if value in kept)
    return offers


def _affordable(rng: random.Random, wish: _Wish) -> int:
    """Return a random price in cents. If similar products had the goal's price, it would give the goal away."""
    return rng.randrange(40 * wish.max_price, 100 * wish.max_price)


def _other_title_attribute(rng: random.Random, wish: _Wish, product_id: str) -> Product:
    """Return a product without the requested attribute that is in the goal's title."""
    return _lacking(rng, wish, product_id, wish.requested[0])


def _other_hidden_attribute(rng: random.Random, wish: _Wish, product_id: str) -> Product:
    """Return a product with the goal's title, but without a requested attribute that only its other pages show."""
    return _lacking(rng, wish, product_id, rng.choice(wish.requested[1:]))


def _lacking(rng: random.Random, wish: _Wish, product_id: str, lacked: str) -> Product:
    other = rng.choice([attribute for attribute in wish.department.attributes if attribute not in wish.attributes])
    attributes = tuple(other if attribute == lacked else attribute for attribute in wish.attributes)
    return _product(rng, product_id, wish.department, wish.kind, attributes, wish.offers, _affordable(rng, wish))


def _other_offer(rng: random.Random, wish: _Wish, product_id: str) -> Product:
    """Return a product without the requested value of one option."""
    option = rng.choice(list(wish.offers))
    others = tuple(value for value in wish.department.options[option] if value != wish.chosen[option])
    offers = wish.offers | {option: others[:4]}
    return _product(rng, product_id, wish.department, wish.kind, wish.attributes, offers, _affordable(rng, wish))


def _too_dear(rng: random.Random, wish: _Wish, product_id: str) -> Product:
    cents = 100 * wish.max_price + rng.randrange(1, wish.department.max_cents // 2)
    return _product(rng, product_id, wish.department, wish.kind, wish.attributes, wish.offers, cents)


def _other_kind(rng: random.Random, wish: _Wish, product_id: str) -> Product:
    # No noun in common: to WebShop's reward, which needs only one, a canvas shoe is as good as a running shoe.
    kind = rng.choice([kind for kind in wish.department.kinds if not kind.nouns & wish.kind.nouns])
    return _product(rng, product_id, wish.department, kind, wish.attributes, wish.offers, _affordable(rng, wish))


_DIFFERENCES: tuple[Callable[[random.Random, _Wish, str], Product], ...] = (
    _other_title_attribute,
    _other_hidden_attribute,
    _other_hidden_attribute,
    _other_offer,
    _too_dear,
    _other_kind,
)


def _unrelated(rng: random.Random, product_id: str) -> Product:
    department = rng.choice(DEPARTMENTS)
    attributes = tuple(rng.sample(department.attributes, NUM_ATTRIBUTES))
    cents = rng.randrange(500, department.max_cents)
    offers = _draw_offers(rng, department)
    return _product(rng, product_id, department, rng.choice(department.kinds), attributes, offers, cents)


def _product_ids(rng: random.Random) -> list[str]:
    """Return distinct random codes in the format of WebShop's."""
    letters = "0123456789abcdefghijklmnopqrstuvwxyz"
    ids: dict[str, None] = {}
    while len(ids) < NUM_PRODUCTS:
        ids["b0" + "".join(rng.choices(letters, k=8))] = None
    return list(ids)


def _product(
    rng: random.Random,
    product_id: str,
    department: Department,
    kind: Kind,
    attributes: tuple[str, ...],
    offers: dict[str, tuple[str, ...]],
    cents: int,
) -> Product:
    brand = rng.choice(department.brands)
    in_title, hidden = attributes[:NUM_TITLE_ATTRIBUTES], attributes[NUM_TITLE_ATTRIBUTES:]
    reviews = [f"{rng.randrange(2, 6)} of 5: {text}" for text in rng.sample(REVIEWS, 2)]
    return Product(
        product_id=product_id,
        kind=kind,
        title=f"{brand} {kind.name.title()}, {', '.join(in_title)}",
        attributes=frozenset(attributes),
        price=cents / 100,
        options=offers,
        sections={
            "description": f"A {kind.name} by {brand}, {hidden[0]}, {in_title[0]}.",
            "features": f"{'; '.join(hidden)}; {in_title[1]}",
            "reviews": "; ".join(reviews),
        },
    )
