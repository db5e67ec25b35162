"""The full profile's catalogue: hundreds of products in four departments, with further pages and hidden attributes.

A product's title names two of its attributes; the others stand in its features and description. An eighth of
the catalogue differs from what is asked in one thing each, half of that in something the list of results does not show.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from common.trajectory import Task
from envhub.bm25 import Bm25
from envhub.shop.catalogue import Goal, Kind, Product, Store
from envhub.task_seed import split_of, task_rng

NUM_PRODUCTS = 200
NUM_NEAR = 24
NUM_TITLE_ATTRIBUTES = 2
NUM_ATTRIBUTES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Department:
    """Kinds that share attributes, options and brands."""

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
        kinds=_kinds("fashion", {
            "shoes": ("running shoe", "hiking boot", "ankle boot", "canvas shoe"),
            "outerwear": ("rain jacket", "denim jacket", "wool coat", "fleece vest"),
            "accessories": ("leather belt", "wool scarf", "sun hat", "travel wallet"),
        }),
        attributes=("machine wash", "water resistant", "slim fit", "lightweight", "breathable", "non slip",
                    "arch support", "quick drying", "hand made", "stretch fabric", "rubber sole",
                    "long lasting", "easy care", "vegan"),
        options={"color": COLORS, "size": ("x-small", "small", "medium", "large", "x-large"),
                 "fit": ("regular", "narrow", "wide"), "pattern": ("solid", "striped", "plaid", "dotted")},
        brands=("Aldermoor", "Northbay", "Tessaly", "Wickerson", "Oakline"),
        max_cents=18_000,
    ),
    Department(
        kinds=_kinds("home", {
            "lighting": ("desk lamp", "floor lamp", "wall light", "string light"),
            "furniture": ("coffee table", "side table", "office chair", "storage bench"),
            "bedding": ("pillow cover", "duvet cover", "throw blanket", "bed sheet"),
        }),
        attributes=("easy assemble", "space saving", "solid wood", "stainless steel", "dimmable", "super soft",
                    "fade proof", "memory foam", "eco friendly", "heavy duty", "wall mounted", "easy clean",
                    "hypoallergenic", "foldable"),
        options={"color": COLORS, "finish": ("matte", "glossy", "brushed", "rustic"),
                 "pack": ("single", "pair", "set of four"), "width": ("40 cm", "60 cm", "90 cm")},
        brands=("Hearthly", "Lumenor", "Fennick", "Casa Brill", "Dovetail"),
        max_cents=40_000,
    ),
    Department(
        kinds=_kinds("electronics", {
            "audio": ("bluetooth speaker", "wireless headphone", "radio clock", "soundbar speaker"),
            "accessories": ("phone case", "phone charger", "tablet stand", "laptop sleeve"),
            "cameras": ("action camera", "camera tripod", "security camera", "camera bag"),
        }),
        attributes=("fast charging", "noise cancelling", "water proof", "shock proof", "hands free", "high definition",
                    "long battery life", "plug and play", "carbon fiber", "night vision", "ultra thin", "stereo sound",
                    "easy install", "scratch resistant"),
        options={"color": COLORS, "storage": ("32 gb", "64 gb", "128 gb"),
                 "cable": ("one meter", "two meters", "three meters"), "edition": ("standard", "travel", "studio")},
        brands=("Voltera", "Pixmere", "Sonarch", "Brightkey", "Ampere & Co"),
        max_cents=30_000,
    ),
    Department(
        kinds=_kinds("grocery", {
            "snacks": ("trail mix", "protein bar", "granola bar", "rice cracker"),
            "drinks": ("green tea", "herbal tea", "coffee bean", "cocoa powder"),
            "care": ("hand cream", "face cream", "shampoo bar", "bath salt"),
        }),
        attributes=("gluten free", "sugar free", "non gmo", "dairy free", "low sodium", "fair trade",
                    "plant based", "cruelty free", "high protein", "caffeine free", "keto friendly", "paraben free",
                    "organic", "kosher"),
        options={"flavor": ("vanilla", "lemon", "mint", "berry", "ginger", "almond", "honey"),
                 "weight": ("100 g", "250 g", "500 g", "1 kg"), "pack": ("single", "pair", "box of six"),
                 "box": ("plain box", "gift box")},
        brands=("Meadowlark", "Grovely", "Sunmill", "Pure Acre", "Kettle & Fern"),
        max_cents=6_000,
    ),
)  # fmt: skip

TEMPLATES = (
    "Find me {attributes} {kind} with {options}, and price lower than {price} dollars",
    "I am looking for a {kind} that is {attributes}, with {options}, and price lower than {price} dollars",
    "I need a {attributes} {kind}. Please choose {options}. It should cost less than {price} dollars",
    "Buy a {kind} for me: {attributes}, {options}, under {price} dollars",
)

REVIEWS = (
    "does what it says", "arrived early and well packed", "a gift that was liked", "smaller than I thought",
    "would buy it again", "good value", "my second one", "the colour is as shown",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wish:
    """The goal's product before it has a page: what near products are changed from."""

    department: Department
    kind: Kind
    attributes: tuple[str, ...]  # of the product; the first NUM_TITLE_ATTRIBUTES are in the title
    asked: tuple[str, ...]  # of those, at least one that the title hides
    offers: dict[str, tuple[str, ...]]
    chosen: dict[str, str]
    cents: int
    max_price: int  # dollars


def make_full_store(task: Task) -> Store:
    """Return the world of `task`. Raises ValueError for a split that does not exist."""
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
            attributes=frozenset(wish.asked),
            options=wish.chosen,
            max_price=wish.max_price,
            product_id=ids[0],
        ),
        instruction=instruction,
        searches=_searches(wish),
    )


def _draw_wish(rng: random.Random) -> tuple[_Wish, str]:
    """A wish, and the instruction that says it."""
    department = rng.choice(DEPARTMENTS)
    attributes = rng.sample(department.attributes, NUM_ATTRIBUTES)
    hidden = attributes[NUM_TITLE_ATTRIBUTES:]
    offers = _draw_offers(rng, department)
    cents = rng.randrange(500, department.max_cents // 2)
    wish = _Wish(
        department=department,
        kind=rng.choice(department.kinds),
        attributes=tuple(attributes),
        asked=(rng.choice(attributes[:NUM_TITLE_ATTRIBUTES]), *rng.sample(hidden, rng.choice((1, 2)))),
        offers=offers,
        chosen={option: rng.choice(values) for option, values in offers.items()},
        cents=cents,
        max_price=10 * (cents // 1000 + rng.randrange(1, 5)),
    )
    instruction = rng.choice(TEMPLATES).format(
        kind=wish.kind.name,
        attributes=", ".join(wish.asked),
        options=", and ".join(f"{option}: {value}" for option, value in wish.chosen.items()),
        price=f"{wish.max_price:.2f}",
    )
    return wish, instruction


def _searches(wish: _Wish) -> tuple[str, ...]:
    """What customers would type, from good to useless, in the words of the instruction."""
    kind = wish.kind.name
    stranger = next(other.name for other in wish.department.kinds if other != wish.kind)
    return (
        f"{' '.join(wish.asked)} {kind}",
        f"{wish.asked[0]} {kind}",
        kind,
        f"{' '.join(wish.chosen.values())} {kind}",
        stranger,
    )


def _draw_offers(rng: random.Random, department: Department) -> dict[str, tuple[str, ...]]:
    """Three options with two to four values each, in the department's own order."""
    names = set(rng.sample(list(department.options), 3))
    offers = {}
    for name, values in department.options.items():
        if name in names:
            kept = set(rng.sample(values, min(rng.randrange(2, 5), len(values))))
            offers[name] = tuple(value for value in values if value in kept)
    return offers


def _affordable(rng: random.Random, wish: _Wish) -> int:
    """Cents. A price of its own, or those that share the goal's would point at it."""
    return rng.randrange(40 * wish.max_price, 100 * wish.max_price)


def _other_title_attribute(rng: random.Random, wish: _Wish, product_id: str) -> Product:
    """Lacks the asked attribute that the goal's title names."""
    return _lacking(rng, wish, product_id, wish.asked[0])


def _other_hidden_attribute(rng: random.Random, wish: _Wish, product_id: str) -> Product:
    """Has the goal's title, and lacks something asked that only its further pages tell."""
    return _lacking(rng, wish, product_id, rng.choice(wish.asked[1:]))


def _lacking(rng: random.Random, wish: _Wish, product_id: str, lacked: str) -> Product:
    other = rng.choice([attribute for attribute in wish.department.attributes if attribute not in wish.attributes])
    attributes = tuple(other if attribute == lacked else attribute for attribute in wish.attributes)
    return _product(rng, product_id, wish.department, wish.kind, attributes, wish.offers, _affordable(rng, wish))


def _other_offer(rng: random.Random, wish: _Wish, product_id: str) -> Product:
    """Does not come in what is asked of one option."""
    option = rng.choice(list(wish.offers))
    others = tuple(value for value in wish.department.options[option] if value != wish.chosen[option])
    offers = wish.offers | {option: others[:4]}
    return _product(rng, product_id, wish.department, wish.kind, wish.attributes, offers, _affordable(rng, wish))


def _too_dear(rng: random.Random, wish: _Wish, product_id: str) -> Product:
    cents = 100 * wish.max_price + rng.randrange(1, wish.department.max_cents // 2)
    return _product(rng, product_id, wish.department, wish.kind, wish.attributes, wish.offers, cents)


def _other_kind(rng: random.Random, wish: _Wish, product_id: str) -> Product:
    # A canvas shoe is as good as a running shoe to WebShop's reward, which asks for one noun in common.
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
    """Codes in WebShop's form, without repeats and without order."""
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
