"""WebShop, from files in its true form that are written here, and its reward with words that match nearly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.envhub.assets.webshop import _prices, read_data
from slipstream.envhub.assets.webshop_reward import nouns, token_set_ratio, type_reward, web_reward
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.shop.products import Goal, Kind, Product
from tests.adapters.held import USUAL, acted, keeps
from tests.envhub import test_env_contract as contract
from tests.envhub.env_cases import Case

CHECKS = [
    *USUAL,
    contract.test_every_admissible_action_is_understood,
    contract.test_a_random_policy_never_breaks_it_and_every_turn_says_what_it_earned,
    contract.test_train_and_held_out_tasks_share_no_text,
    contract.test_the_expert_solves_its_tasks,
]
SHOE = Kind(name="Acme Canvas Running Shoe", category=("shoes", "Fashion", "Men", "Shoes"))
WISHES = frozenset({"machine wash", "vegan leather"})
GOAL = Goal(kind=SHOE, attributes=WISHES, options={"0": "navy", "1": "10"}, max_price=30.0, product_id="b1")
COLOURS, THINGS = ("navy", "teal", "olive"), ("sneaker", "lamp", "backpack", "blender", "curtain")


def item(number: int) -> dict[str, Any]:
    """A product as items_shuffle.json has it, with some of the fields that are not needed."""
    thing = THINGS[number % len(THINGS)]
    colours = [{"value": colour, "image": None, "is_selected": False} for colour in COLOURS]
    choices = {"Color": colours, "Size": [{"value": "10/11"}, {"value": "X-Large [EU]"}], "Style": None}
    return {
        "asin": f"B0{number:08d}",
        "name": f"Acme{number} {thing.title()} for Home, Machine Washable",
        "category": "fashion",
        "query": f"{thing}s",
        "product_category": f"Home \u203a Things \u203a {thing}",
        "full_description": f"A {thing} to like." if number % 2 else None,
        "small_description": ["Closes with a zipper", None] if number % 3 else "One line",
        "pricing": ["$12.50", "$1,012.50 to $1,020.00", "", None][number % 4],
        "customization_options": choices if number % 5 else "",
        "images": ["https://example.com/x.jpg"],
        "average_rating": 4.5,
        "brand": "Acme",
    }


def written(folder: Path) -> str:
    items = [item(number) for number in range(40)]
    asked = {
        each["asin"]: [
            {
                "asin": each["asin"],
                "instruction": f"i want number {number} of the {each['query']}, machine wash.",
                "instruction_attributes": ["machine wash"],
                "instruction_options": ["navy", "10 | 11"] if number % 5 else [],
                "worker_id": "w",
                "assignment_id": "a",
            },
            {"asin": each["asin"], "instruction": "unclear", "instruction_attributes": [], "instruction_options": []},
        ]
        for number, each in enumerate(items)
    }
    told = {each["asin"]: {"attributes": ["machine washable", "zipper"], "instruction": None} for each in items[:-1]}
    (folder / "items_shuffle_1000.json").write_text(json.dumps(items))
    (folder / "items_ins_v2_1000.json").write_text(json.dumps(told))
    (folder / "items_human_ins.json").write_text(json.dumps(asked))
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("webshop"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_webshop_keeps_the_contract(check: Callable[..., None], folder: str) -> None:
    keeps(check, Case("webshop", 20, 0.5, {"folder": folder}, share=0.05, distinct=0.1), splits=("train", "held_out"))


def test_files_are_read_as_webshop_reads_them(folder: str) -> None:
    data = read_data(Path(folder), 1000)
    assert len(data.products) == 40 and len(data.instructions) == 40  # those without attributes are left out
    first, second, last = data.products[0], data.products[1], data.products[-1]
    assert [product.price for product in data.products[:4]] == [12.5, 1012.5, 100.0, 100.0]
    assert data.prices[1] == (1012.5, 1020.0)
    assert (first.options, last.attributes) == ({}, frozenset())
    assert second.options == {"color": COLOURS, "size": ("10 | 11", "x-large eu")}
    assert second.kind.category == ("lamps", "Home", "Things", "lamp")
    assert second.sections == {"description": "A lamp to like.", "features": "Closes with a zipper"}
    assert read_data(Path(folder), 7).products == data.products[:7]


def test_a_price_is_read_in_any_text() -> None:
    prices = {"$.99": (0.99,), "$12.99 ($0.41 / Ounce)": (12.99, 0.41), "$5.00 - Fr. 6": (5.0,), "$1.2.3": (1.2,)}
    prices |= {"$. to $7": (7.0,), "free": (100.0,)}
    assert {text: _prices(text) for text in prices} == prices


def test_an_instruction_names_a_bound_above_the_price(folder: str) -> None:
    for index in range(30):
        said = acted("webshop", {"folder": folder}, index, [])[0].messages[1].content
        number = int(said.split("number ")[1].split()[0])
        price = max(read_data(Path(folder), 1000).prices[number])
        bound = said.partition(", and price lower than ")[2]
        assert bound == "" if price > 980 else price < float(bound.split()[0]) <= (price // 10 + 4) * 10


def test_pages_are_those_of_shop(folder: str) -> None:
    actions = ["search[Acme7 backpack]", "click[B000000007]", "click[10 | 11]", "click[B000000008]"]
    opening, found, page, chosen, other = acted("webshop", {"folder": folder}, 0, actions)
    assert opening.messages[1].content.startswith("WebShop [SEP] Instruction: [SEP] i want number ")
    assert "B000000007 [SEP] Acme7 Backpack for Home, Machine Washable [SEP] $100.00" in found.messages[0].content
    assert "color [SEP] navy [SEP] teal [SEP] olive [SEP] size [SEP] 10 | 11" in page.messages[0].content
    assert "10 | 11 (chosen)" in chosen.messages[0].content
    assert not other.valid_action


@pytest.mark.parametrize(
    ("one", "other", "ratio"),
    [
        ("fuzzy was a bear", "Fuzzy, fuzzy was a bear!", 100),
        ("machine wash", "machine washable", 86),
        ("long sleeve", "short sleeve", 71),
        ("navy", "dark navy blue", 100),
        ("gluten free", "dairy", 12),
        ("!", "x", 0),
    ],
)
def test_the_token_set_ratio_is_that_of_thefuzz(one: str, other: str, ratio: int) -> None:
    assert round(token_set_ratio(one, other)) == round(token_set_ratio(other, one)) == ratio


def product(kind: Kind = SHOE, price: float = 20.0) -> Product:
    return Product(
        product_id="b1",
        kind=kind,
        title=kind.name,
        attributes=frozenset({"machine washable"}),
        price=price,
        options={"color": ("dark navy",), "size": ("10",)},
        sections={"description": "Vegan leather.", "features": "x"},
    )


def test_the_reward_by_hand_to_which_an_option_that_nobody_asked_for_adds_nothing() -> None:
    """Two attributes, one nearly and one by the description, two options, one nearly, and the price: of five asked."""
    dear = product(price=31.0)
    whole = {"color": "dark navy", "size": "10"}
    assert web_reward(product(), GOAL, whole) == 1.0
    assert web_reward(dear, GOAL, whole) == pytest.approx(4 / 5)
    assert web_reward(product(), GOAL, {"size": "10"}) == pytest.approx(4 / 5)
    assert web_reward(product(), GOAL, {"size": "10.5", "color": "red"}) == pytest.approx(3 / 5)
    more = {"material": "vegan leather", "kind": "canvas"}
    assert web_reward(dear, GOAL, whole | more | {"use": "navy"}) == pytest.approx(4 / 5)
    assert web_reward(dear, GOAL, more) == pytest.approx(2 / 5)


def test_the_type_of_what_was_bought_scales_it() -> None:
    def bought(name: str, *category: str) -> float:
        return type_reward(product(Kind(name=name, category=category)), GOAL)

    assert nouns(SHOE.name) == {"acme", "canvas", "running", "shoe"}
    assert bought("Toaster 2 Slice", "toasters", "Home") == 0.0
    assert bought("Bosch Shoe", "boots", "Toys", "Dolls") == 1.0  # one noun of four
    kind = Kind(name="two x y z of big canvas shoe bag tote", category=("q", "L", "M"))
    asked = Goal(kind=kind, attributes=frozenset("x"), options={}, max_price=1, product_id="b1")
    few = product(Kind(name="canvas", category=("other", "L")))
    assert type_reward(few, asked) == 0.5  # one noun of seven
    assert type_reward(product(Kind(name="canvas", category=("other", "L", "M"))), asked) == 1.0
    assert type_reward(product(Kind(name="canvas", category=("q",))), asked) == 1.0


def test_what_is_missing_is_said_with_what_to_fetch_or_to_increase(folder: str, tmp_path: Path) -> None:
    for options, why in (
        ({}, "`env.options.folder` must be set; get items_shuffle.json"),
        ({"folder": str(tmp_path)}, ".*items_shuffle.json does not exist; get items_shuffle.json"),
        ({"folder": folder, "products": 0}, "`env.options.products` must be a whole number"),
    ):
        with pytest.raises(ValueError, match=why):
            make_env("webshop", options)
    (tmp_path / "items_shuffle.json").write_text('[{"asin": "B1"}]')
    with pytest.raises(ValueError, match=r"items_shuffle\.json: Object missing required field `name`"):
        make_env("webshop", {"folder": str(tmp_path)})
    for name, content in (("shuffle", [item(0)]), ("ins_v2", {}), ("human_ins", {})):
        (tmp_path / f"items_{name}.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"products`: the first 7 products in .* have no instructions; increase it"):
        make_env("webshop", {"folder": str(tmp_path), "products": 7})
