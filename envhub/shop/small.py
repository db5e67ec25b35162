"""The small profile's catalogue: six products in about 50 words, for a model that learns to read from nothing.

Beside the goal stand three products that differ from what is asked in one thing each (too dear, another attribute,
another kind) and two that differ in all. A product's code is its title and its price: a model of half a million
weights learns to copy words in seconds and to look up a code that stands beside them in hours.
"""

import random
from dataclasses import replace

from common.trajectory import Task
from envhub.bm25 import Bm25
from envhub.shop.catalogue import Goal, Kind, Product, Store
from envhub.task_seed import split_of, task_rng

KINDS = tuple(
    Kind(name=name, category=("clothing", name))
    for name in ("shirt", "jacket", "dress", "coat", "hat", "scarf", "skirt", "sweater")
)
ATTRIBUTES = (
    "casual", "cotton", "hooded", "light", "plain", "quilted", "slim", "soft", "stretch", "striped", "vintage", "warm",
)  # fmt: skip
COLORS = ("red", "blue", "green", "black", "white", "grey", "pink", "brown")
SIZES = ("small", "medium", "large")
PRICES = (10, 20, 30, 40, 50)
MAX_PRICES = (15, 25, 35, 45)  # between the prices: "under 25" needs no rule about equality
NUM_COLORS = 3


def make_small_store(task: Task) -> Store:
    """Return the world of `task`. Raises ValueError for a split that does not exist."""
    rng = task_rng(task, world="shop/small")
    goal = _draw_goal(rng)
    while split_of(_instruction(goal)) != task.split:
        goal = _draw_goal(rng)
    wanted = _wanted(rng, goal)
    near = [_too_dear(rng, goal), _other_attribute(rng, goal), _other_kind(rng, goal)]
    unrelated = [_unrelated(rng, goal)]
    while len({product.title for product in unrelated}) < 2:
        unrelated = [unrelated[0], _unrelated(rng, goal)]
    products = [wanted, *near, *unrelated]
    rng.shuffle(products)
    asked = " ".join(goal.attributes)
    return Store(
        products=tuple(products),
        index=Bm25([product.title for product in products]),
        goal=replace(goal, product_id=wanted.product_id),
        instruction=_instruction(goal),
        searches=(f"{asked} {goal.kind.name}", goal.kind.name, asked, *(product.title for product in unrelated)),
    )


def _draw_goal(rng: random.Random) -> Goal:
    """What is wanted; which product has it all is not known yet."""
    return Goal(
        kind=rng.choice(KINDS),
        attributes=frozenset({rng.choice(ATTRIBUTES)}),
        options={"color": rng.choice(COLORS), "size": rng.choice(SIZES)},
        max_price=rng.choice(MAX_PRICES),
        product_id="",
    )


def _instruction(goal: Goal) -> str:
    wanted = [*goal.attributes, goal.kind.name, *goal.options.values()]
    return f"find {' '.join(wanted)} under {goal.max_price:.0f}"


def _wanted(rng: random.Random, goal: Goal) -> Product:
    price = rng.choice([price for price in PRICES if price < goal.max_price])
    return _product(rng, goal.kind, goal.attributes, price, color=goal.options["color"])


def _too_dear(rng: random.Random, goal: Goal) -> Product:
    price = rng.choice([price for price in PRICES if price > goal.max_price])
    return _product(rng, goal.kind, goal.attributes, price)


def _other_attribute(rng: random.Random, goal: Goal) -> Product:
    return _product(rng, goal.kind, _attributes_but(rng, goal.attributes), rng.choice(PRICES))


def _other_kind(rng: random.Random, goal: Goal) -> Product:
    return _product(rng, _kind_but(rng, goal.kind), goal.attributes, rng.choice(PRICES))


def _unrelated(rng: random.Random, goal: Goal) -> Product:
    return _product(rng, _kind_but(rng, goal.kind), _attributes_but(rng, goal.attributes), rng.choice(PRICES))


def _kind_but(rng: random.Random, unwanted: Kind) -> Kind:
    return rng.choice([kind for kind in KINDS if kind != unwanted])


def _attributes_but(rng: random.Random, unwanted: frozenset[str]) -> frozenset[str]:
    return frozenset({rng.choice([attribute for attribute in ATTRIBUTES if attribute not in unwanted])})


def _product(
    rng: random.Random, kind: Kind, attributes: frozenset[str], price: int, *, color: str | None = None
) -> Product:
    """A product in three colours, `color` among them when given."""
    colors = rng.sample(COLORS, NUM_COLORS)
    if color is not None and color not in colors:
        colors[rng.randrange(NUM_COLORS)] = color
    title = " ".join([*attributes, kind.name])
    return Product(
        product_id=f"{title} {price}",
        kind=kind,
        title=title,
        attributes=attributes,
        price=price,
        options={"color": tuple(colors), "size": SIZES},
        sections={},
    )
