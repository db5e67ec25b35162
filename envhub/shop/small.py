"""Draws the catalogue of the small profile: six products in about 50 words, for a model without pretraining.

Three products differ from the goal in one thing each (price too high, another attribute, another kind). Two differ in
all. The code of a product is its title and its price: a model of half a million weights learns in seconds to copy these
words, but takes hours to learn to look up a separate code.
"""

import random
from dataclasses import replace
from functools import lru_cache

from slipstream.common.records.trajectory import Task
from slipstream.envhub.bm25 import Bm25
from slipstream.envhub.name_list import name_list
from slipstream.envhub.shop.products import Goal, Kind, Product, Store
from slipstream.envhub.task_seed import split_of, task_rng

KINDS = tuple(
    Kind(name=name, category=("clothing", name))
    for name in ("shirt", "jacket", "dress", "coat", "hat", "scarf", "skirt", "sweater")
)
ATTRIBUTES = name_list("casual, cotton, hooded, light, plain, quilted, slim, soft, stretch, striped, vintage, warm")
COLORS = ("red", "blue", "green", "black", "white", "grey", "pink", "brown")
SIZES = ("small", "medium", "large")
PRICES = (10, 20, 30, 40, 50)
MAX_PRICES = (15, 25, 35, 45)  # between the prices, so that no price equals the limit
NUM_COLORS = 3


@lru_cache(maxsize=16)  # siblings play the same task at about the same time
def make_small_store(task: Task) -> Store:
    rng = task_rng(task, world="shop/small")
    goal = _draw_goal(rng)
    while split_of(_instruction(goal)) != task.split:
        goal = _draw_goal(rng)
    affordable = [price for price in PRICES if price < goal.max_price]
    wanted = _product(rng, goal.kind, goal.attributes, rng.choice(affordable), color=goal.options["color"])
    near = [
        _product(rng, goal.kind, goal.attributes, rng.choice([price for price in PRICES if price > goal.max_price])),
        _product(rng, goal.kind, _attributes_but(rng, goal.attributes), rng.choice(PRICES)),
        _product(rng, _kind_but(rng, goal.kind), goal.attributes, rng.choice(PRICES)),
    ]
    unrelated = [_unrelated(rng, goal)]
    while len({product.title for product in unrelated}) < 2:
        unrelated = [unrelated[0], _unrelated(rng, goal)]
    products = [wanted, *near, *unrelated]
    rng.shuffle(products)
    attributes = " ".join(goal.attributes)
    return Store(
        products=tuple(products),
        index=Bm25([product.title for product in products]),
        goal=replace(goal, product_id=wanted.product_id),
        instruction=_instruction(goal),
        searches=(
            f"{attributes} {goal.kind.name}",
            goal.kind.name,
            attributes,
            *(product.title for product in unrelated),
        ),
    )


def _draw_goal(rng: random.Random) -> Goal:
    """Return a goal whose product is not known yet."""
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


def _unrelated(rng: random.Random, goal: Goal) -> Product:
    return _product(rng, _kind_but(rng, goal.kind), _attributes_but(rng, goal.attributes), rng.choice(PRICES))


def _kind_but(rng: random.Random, unwanted: Kind) -> Kind:
    return rng.choice([kind for kind in KINDS if kind != unwanted])


def _attributes_but(rng: random.Random, unwanted: frozenset[str]) -> frozenset[str]:
    return frozenset({rng.choice([attribute for attribute in ATTRIBUTES if attribute not in unwanted])})


def _product(
    rng: random.Random, kind: Kind, attributes: frozenset[str], price: int, *, color: str | None = None
) -> Product:
    """Return a product in three colours, with `color` among them if it is given."""
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
