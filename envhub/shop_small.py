"""The small profile's catalogue: six products in about 65 words, for a model that learns to read from nothing.

Beside the goal stand three products that differ from what is asked in one thing each, and two of other kinds.
"""

import random

from common.trajectory import Task
from envhub.bm25 import Bm25
from envhub.shop_catalogue import Goal, Kind, Product, Store
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
    ids = ["b1", "b2", "b3", "b4", "b5", "b6"]
    rng.shuffle(ids)
    goal = _draw_goal(rng, product_id=ids[0])
    while split_of(_instruction(goal)) != task.split:
        goal = _draw_goal(rng, product_id=ids[0])
    products = [_wanted(rng, goal)]
    differences = rng.sample((_other_attribute, _other_attribute, _too_dear, _other_kind), 3)
    products += [differ(rng, goal, product_id) for differ, product_id in zip(differences, ids[1:4], strict=True)]
    products += [_unrelated(rng, goal, product_id) for product_id in ids[4:]]
    products.sort(key=lambda product: product.product_id)
    asked = " ".join(sorted(goal.attributes))
    unrelated = [product.title for product in products if product.product_id in ids[4:]]
    return Store(
        products=tuple(products),
        index=Bm25([product.title for product in products]),
        goal=goal,
        instruction=_instruction(goal),
        searches=(f"{asked} {goal.kind.name}", goal.kind.name, asked, *unrelated),
    )


def _draw_goal(rng: random.Random, *, product_id: str) -> Goal:
    return Goal(
        kind=rng.choice(KINDS),
        attributes=frozenset({rng.choice(ATTRIBUTES)}),
        options={"color": rng.choice(COLORS), "size": rng.choice(SIZES)},
        max_price=rng.choice(MAX_PRICES),
        product_id=product_id,
    )


def _instruction(goal: Goal) -> str:
    wanted = [*sorted(goal.attributes), goal.kind.name, *goal.options.values()]
    return f"find {' '.join(wanted)} under {goal.max_price:.0f}"


def _wanted(rng: random.Random, goal: Goal) -> Product:
    price = rng.choice([price for price in PRICES if price < goal.max_price])
    return _product(rng, goal.product_id, goal.kind, goal.attributes, price, color=goal.options["color"])


def _other_attribute(rng: random.Random, goal: Goal, product_id: str) -> Product:
    other = rng.choice([attribute for attribute in ATTRIBUTES if attribute not in goal.attributes])
    return _product(rng, product_id, goal.kind, frozenset({other}), rng.choice(PRICES))


def _too_dear(rng: random.Random, goal: Goal, product_id: str) -> Product:
    price = rng.choice([price for price in PRICES if price > goal.max_price])
    return _product(rng, product_id, goal.kind, goal.attributes, price)


def _other_kind(rng: random.Random, goal: Goal, product_id: str) -> Product:
    kind = rng.choice([kind for kind in KINDS if kind != goal.kind])
    return _product(rng, product_id, kind, goal.attributes, rng.choice(PRICES))


def _unrelated(rng: random.Random, goal: Goal, product_id: str) -> Product:
    kind = rng.choice([kind for kind in KINDS if kind != goal.kind])
    other = rng.choice([attribute for attribute in ATTRIBUTES if attribute not in goal.attributes])
    return _product(rng, product_id, kind, frozenset({other}), rng.choice(PRICES))


def _product(
    rng: random.Random, product_id: str, kind: Kind, attributes: frozenset[str], price: int, *, color: str | None = None
) -> Product:
    """A product in three colours, `color` among them when given."""
    colors = rng.sample(COLORS, NUM_COLORS)
    if color is not None and color not in colors:
        colors[rng.randrange(NUM_COLORS)] = color
    return Product(
        product_id=product_id,
        kind=kind,
        title=" ".join([*sorted(attributes), kind.name]),
        attributes=attributes,
        price=price,
        options={"color": tuple(colors), "size": SIZES},
        sections={},
    )
