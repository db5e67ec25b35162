"""`webshop`: WebShop's products and instructions, from the user's files, on the pages of `shop`."""

import functools
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.assets.webshop_reward import web_reward
from slipstream.envhub.bm25 import Bm25
from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_range
from slipstream.envhub.shop.products import Goal, Kind, Product, Store
from slipstream.envhub.shop.shop import PROFILES, ShopWorld
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.user_files import asset_path, read_json
from slipstream.envhub.world import WorldEnv

DEFAULT_DOLLARS = 100.0  # the price of a product without one
NO_BOUND = 1_000_000.0
BOUNDS = tuple(10.0 * tens for tens in range(1, 100))
LEVEL = "\u203a"  # the separator of a category's levels
DRAWS = 1000  # attempts to draw an instruction of the split
FETCH = (
    "get items_shuffle.json, items_ins_v2.json and items_human_ins.json (or the first two with _1000 in their names) "
    "by setup.sh of github.com/princeton-nlp/WebShop, and put them into one folder"
)

_AMOUNT = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+", re.ASCII)


class _Choice(msgspec.Struct):
    value: str


class _Item(msgspec.Struct):
    """The fields of a product of items_shuffle.json that this environment uses."""

    asin: str
    name: str
    category: str
    query: str
    product_category: str
    full_description: str | None = None
    small_description: list[str | None] | str | None = None
    pricing: str | None = None
    customization_options: dict[str, list[_Choice] | None] | str | None = None


class _Attributes(msgspec.Struct):
    """A product's attributes in items_ins_v2.json."""

    attributes: list[str] = []


class _Instruction(msgspec.Struct):
    """A person's instruction in items_human_ins.json."""

    instruction: str
    instruction_attributes: list[str]
    instruction_options: list[str] | dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class WebShopData:
    """All products, and the instructions, each with the position of the product that it was written for."""

    products: tuple[Product, ...]
    index: Bm25
    prices: tuple[tuple[float, ...], ...]  # one, or the ends of a range
    instructions: tuple[tuple[int, _Instruction], ...]


def make_webshop_env(*, folder: str = "", products: int = 1000) -> Env:
    """Make an environment of WebShop's instructions. Raises ValueError if a file is missing or malformed.

    `folder` contains WebShop's files; the first `products` of its products are used. An instruction's text decides its
    split.
    """
    check_range("products", products, 1, 50_000)
    data = read_data(asset_path("folder", folder, fetch=FETCH), products)
    return WorldEnv(
        f"webshop {folder} products={products}",
        make_world=partial(make_webshop, data=data),
        rules=PROFILES["full"].rules,
    )


def make_webshop(task: Task, *, data: WebShopData) -> ShopWorld:
    """Return the shop and the instruction of `task`. Raises ValueError for a split without instructions."""
    rng = task_rng(task, world="webshop")
    for _ in range(DRAWS):
        position, instruction = rng.choice(data.instructions)
        if split_of(instruction.instruction) == task.split:
            store = _store(rng, data, position, instruction)
            return ShopWorld(profile=PROFILES["full"], store=store, reward=web_reward)
    raise ValueError(
        f"task {task.task_id}: none of the {len(data.instructions)} instructions is in the split; increase "
        "`env.options.products`"
    )


def _store(rng: random.Random, data: WebShopData, position: int, instruction: _Instruction) -> Store:
    """Return the shop with a goal, whose largest price is drawn from the next four tens above the product's price."""
    product = data.products[position]
    above = [bound for bound in BOUNDS if bound > max(data.prices[position])][:4]
    bound = max(rng.sample(above, 2)) if len(above) >= 2 else NO_BOUND
    price_clause = f", and price lower than {bound:.2f} dollars" if bound != NO_BOUND else ""
    options = instruction.instruction_options
    wanted = options if isinstance(options, dict) else {str(number): value for number, value in enumerate(options)}
    attributes = instruction.instruction_attributes
    searches = (_query(product.title), _query(" ".join(attributes)), product.kind.category[0])
    return Store(
        products=data.products,
        index=data.index,
        goal=Goal(
            kind=product.kind,
            attributes=frozenset(attributes),
            options={name: value.lower() for name, value in wanted.items()},
            max_price=bound,
            product_id=product.product_id,
        ),
        instruction=instruction.instruction.strip(".") + price_clause,
        searches=tuple(dict.fromkeys(searches)),
    )


@functools.lru_cache(maxsize=2)
def read_data(folder: Path, num_products: int) -> WebShopData:
    """Read the first products of the folder's files. Raises ValueError if a file is missing or malformed."""
    items = read_json(_file(folder, "items_shuffle"), list[_Item])[:num_products]
    attributes = read_json(_file(folder, "items_ins_v2"), dict[str, _Attributes])
    instructions = read_json(_file(folder, "items_human_ins"), dict[str, list[_Instruction]])
    found = {item.asin.lower(): item for item in items if item.asin != "nan" and len(item.asin) <= 10}
    asked = tuple(
        (position, instruction)
        for position, item in enumerate(found.values())
        for instruction in instructions.get(item.asin, ())
        if instruction.instruction_attributes
    )
    if not asked:
        raise ValueError(
            f"`env.options.products`: the first {num_products} products in {folder} have no instructions; increase it"
        )
    products = [_product(item, attributes.get(item.asin, _Attributes())) for item in found.values()]
    return WebShopData(
        products=tuple(products),
        index=Bm25([" ".join([p.title, *p.sections.values(), *sum(p.options.values(), ())]) for p in products]),
        prices=tuple(_prices(item.pricing) for item in found.values()),
        instructions=asked,
    )


def _file(folder: Path, stem: str) -> Path:
    """Return the file of that name, or the one with the first thousand products."""
    whole, few = folder / f"{stem}.json", folder / f"{stem}_1000.json"
    return few if few.exists() and not whole.exists() else asset_path("folder", str(whole), fetch=FETCH)


def _product(item: _Item, attributes: _Attributes) -> Product:
    points = item.small_description if isinstance(item.small_description, list) else [item.small_description]
    levels = [level.strip() for level in item.product_category.split(LEVEL)]
    return Product(
        product_id=item.asin.lower(),
        kind=Kind(name=item.name, category=(item.query.lower().strip(), *levels)),
        title=item.name,
        attributes=frozenset(attributes.attributes),
        price=min(_prices(item.pricing)),
        options=_options(item.customization_options),
        sections={
            "description": item.full_description or "(none)",
            "features": " ".join(point for point in points if point) or "(none)",
        },
    )


def _options(offered: Mapping[str, list[_Choice] | None] | str | None) -> dict[str, tuple[str, ...]]:
    """Return the options in lower case, without square brackets, because these would end a click."""
    if not offered or isinstance(offered, str):
        return {}
    return {
        name.lower(): tuple(dict.fromkeys(_plain(choice.value.replace("/", " | ")) for choice in choices))
        for name, choices in offered.items()
        if choices
    }


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[\[\]]", " ", text.lower()).split())


def _prices(pricing: str | None) -> tuple[float, ...]:
    """Return the price of "$12.50", both ends of "$12.50 to $20.00", or 100 dollars without one, as in WebShop."""
    found = [_AMOUNT.search(part) for part in (pricing or "").split("$")[1:]]
    return tuple(float(amount[0].replace(",", "")) for amount in found[:2] if amount) or (DEFAULT_DOLLARS,)


def _query(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split()[:12])
