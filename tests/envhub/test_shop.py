"""The shop: its search and reward against hand-computed numbers, its pages against literal texts."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product as combinations

import pytest

from slipstream.common.records.trajectory import Task
from slipstream.envhub.bm25 import Bm25
from slipstream.envhub.shop.full import make_full_store
from slipstream.envhub.shop.pages import Page, clickables, next_page, terse_text, webshop_text
from slipstream.envhub.shop.products import Goal, Kind, Product, Store
from slipstream.envhub.shop.purchase_reward import purchase_reward, type_reward
from slipstream.envhub.shop.shop import PROFILES, ShopEnv, ShopWorld
from slipstream.envhub.shop.small import make_small_store
from tests.envhub.env_cases import task_of

DESK_LAMP = Kind(name="desk lamp", category=("home", "lighting", "desk lamp"))
FLOOR_LAMP = Kind(name="floor lamp", category=("home", "lighting", "floor lamp"))
WALL_LIGHT = Kind(name="wall light", category=("home", "lighting", "wall light"))
LAMP_OIL = Kind(name="lamp oil", category=("garden", "fuel", "lamp oil"))


def lamp(product_id: str, *, kind: Kind = DESK_LAMP, attributes: tuple[str, ...], price: float) -> Product:
    return Product(
        product_id=product_id,
        kind=kind,
        title=f"{' '.join(attributes)} {kind.name}",
        attributes=frozenset(attributes),
        price=price,
        options={"color": ("red", "blue"), "size": ("small", "large")},
        sections={"description": f"a {kind.name}"},
    )


RED_AND_LARGE = {"color": "red", "size": "large"}
GOAL = Goal(
    kind=DESK_LAMP, attributes=frozenset({"plain", "light"}), options=RED_AND_LARGE, max_price=25, product_id="b2"
)
PRODUCTS = (
    lamp("b1", attributes=("light", "striped"), price=20),
    lamp("b2", attributes=("light", "plain"), price=20),
    lamp("b3", attributes=("light", "plain"), price=40),
    lamp("b4", kind=FLOOR_LAMP, attributes=("warm", "soft"), price=10),
)
STORE = Store(
    products=PRODUCTS,
    index=Bm25([product.title for product in PRODUCTS]),
    goal=GOAL,
    instruction="find light plain desk lamp red large under 25",
    searches=("light plain desk lamp",),
)


def walk(*actions: str, page_size: int = 4, ranked: bool = False) -> Page:
    page = Page()
    for action in actions:
        following = next_page(STORE, page, action, page_size=page_size, ranked=ranked)
        assert following is not None, action
        page = following
    return page


def test_bm25_scores_equal_hand_computed_ones_and_the_best_is_first() -> None:
    index = Bm25(["red mug", "blue mug", "red red hat"])
    assert index.scores("mug") == pytest.approx({0: 0.48308, 1: 0.48308}, abs=1e-5)
    assert index.scores("red") == pytest.approx({0: 0.48308, 2: 0.59477}, abs=1e-5)
    assert index.scores("hat") == pytest.approx({2: 0.93046}, abs=1e-5)
    assert [index.rank(query) for query in ("red mug", "MUG!", "lamp", "")] == [[0, 2, 1], [0, 1], [], []]


@pytest.mark.parametrize(
    ("product", "chosen", "reward"),
    [
        (PRODUCTS[1], RED_AND_LARGE, 1.0),
        (PRODUCTS[1], {"color": "red"}, 4 / 5),
        (PRODUCTS[1], {"color": "blue", "size": "small"}, 3 / 5),
        (PRODUCTS[1], {}, 3 / 5),
        (PRODUCTS[0], RED_AND_LARGE, 4 / 5),  # striped, not plain
        (PRODUCTS[2], RED_AND_LARGE, 4 / 5),  # 40 dollars
        (PRODUCTS[2], {"size": "large"}, 3 / 5),
        (PRODUCTS[3], RED_AND_LARGE, 3 / 5),  # another lamp, neither attribute, cheap
        (lamp("b5", kind=WALL_LIGHT, attributes=("light", "plain"), price=20), RED_AND_LARGE, 0.0),
        (lamp("b6", attributes=("light", "plain"), price=25), RED_AND_LARGE, 1.0),  # the bound itself is within it
        (lamp("b7", attributes=("light", "plain"), price=25.01), RED_AND_LARGE, 4 / 5),
    ],
)
def test_the_purchase_reward_equals_webshops(product: Product, chosen: dict[str, str], reward: float) -> None:
    assert purchase_reward(product, GOAL, chosen) == pytest.approx(reward)


def test_the_type_reward_has_webshops_four_values() -> None:
    five_nouns = Kind(name="lamp shade frame wire clip", category=("home", "parts", "clip"))
    eleven_nouns = Kind(name="lamp a b c d e f g h i j", category=("home", "parts", "j"))
    assert type_reward(DESK_LAMP, DESK_LAMP) == 1.0
    assert type_reward(LAMP_OIL, DESK_LAMP) == 1.0  # one noun of two
    assert type_reward(DESK_LAMP, five_nouns) == 0.5  # one noun of five, one level shared
    assert type_reward(DESK_LAMP, eleven_nouns) == 0.1
    assert type_reward(WALL_LIGHT, DESK_LAMP) == 0.0  # a shared shelf does not help where no noun is shared


def test_the_small_pages_have_these_texts() -> None:
    results, product = walk("search[light plain desk lamp]"), walk("search[light plain desk lamp]", "click[b2]")
    assert terse_text(STORE, results, page_size=4) == "b1 [SEP] b2 [SEP] b3 [SEP] b4"
    assert terse_text(STORE, product, page_size=4) == "b2 [SEP] color red blue [SEP] size small large [SEP] buy now"
    chosen = walk("search[lamp]", "click[b2]", "click[large]", "click[red]")
    assert terse_text(STORE, chosen, page_size=4) == "color red [SEP] size large"
    assert terse_text(STORE, walk("search[sofa]"), page_size=4) == "no results"


def test_the_full_pages_have_the_texts_of_webshop() -> None:
    second = walk("search[light plain desk lamp]", "click[next >]", page_size=2, ranked=True)
    assert webshop_text(STORE, second, page_size=2) == (
        "Back to Search [SEP] Page 2 (Total results: 4) [SEP] < Prev [SEP] B1 [SEP] light striped desk lamp [SEP] "
        "$20.00 [SEP] B4 [SEP] warm soft floor lamp [SEP] $10.00"
    )
    product = walk("search[lamp]", "click[b2]", "click[red]")
    assert webshop_text(STORE, product, page_size=4) == (
        "Back to Search [SEP] < Prev [SEP] color [SEP] red (chosen) [SEP] blue [SEP] size [SEP] small [SEP] "
        "large [SEP] light plain desk lamp [SEP] Price: $20.00 [SEP] Description [SEP] Buy Now"
    )
    section = walk("search[lamp]", "click[b2]", "click[red]", "click[Description]")
    assert webshop_text(STORE, section, page_size=4) == "Back to Search [SEP] < Prev [SEP] a desk lamp"


def test_a_click_accepts_only_what_the_page_shows() -> None:
    first = walk("search[lamp]", page_size=2)
    assert clickables(STORE, Page(), page_size=2) == []
    ranked = clickables(STORE, walk("search[lamp]", page_size=2, ranked=True), page_size=2)
    assert ranked[:2] == ["back to search", "next >"]
    assert next_page(STORE, first, "click[b4]", page_size=2, ranked=False) is None
    assert next_page(STORE, first, "search[lamp]", page_size=2, ranked=False) is None
    values = ["red", "blue", "small", "large"]
    targets = ["back to search", "< prev", *values, "description", "buy now"]
    assert clickables(STORE, walk("search[lamp]", "click[b1]"), page_size=4) == targets


def test_leaving_a_product_resets_its_options_but_viewing_its_description_does_not() -> None:
    chosen = walk("search[lamp]", "click[b2]", "click[red]")
    assert walk("search[lamp]", "click[b2]", "click[red]", "click[description]", "click[< prev]") == chosen
    assert walk("search[lamp]", "click[b2]", "click[red]", "click[< prev]", "click[b2]").options == {}


def test_the_expert_buys_a_product_with_one_value_in_two_options() -> None:
    twice = replace(PRODUCTS[1], options={"color": ("red", "blue"), "lining": ("red", "none")})
    store = replace(STORE, products=(twice,), index=Bm25([twice.title]))
    world = ShopWorld(profile=PROFILES["small"], store=store, reward=purchase_reward)
    page = Page(results=(0,), product=0, options={"color": "red"})
    assert world.expert(page) == "click[buy now]"


def test_a_partly_correct_purchase_earns_a_partial_reward_and_is_not_a_success() -> None:
    env = ShopEnv()
    asyncio.run(env.reset(task_of("shop", 0)))
    for action in ("search[plain dress]", "click[plain dress 10]", "click[red]"):
        assert asyncio.run(env.step(action)).rewards == {"purchase": 0.0}
    end = asyncio.run(env.step("click[buy now]"))
    assert (end.rewards, end.score, end.success, end.terminated) == ({"purchase": 0.75}, 0.75, False, True)


def test_the_position_of_the_goal_among_the_results_is_random() -> None:
    places: Counter[int] = Counter()
    for index in range(1000):
        env = ShopEnv()
        asyncio.run(env.reset(task_of("shop", index)))
        rows = asyncio.run(env.step(env.expert())).messages[0].content.split(" [SEP] ")
        places[rows.index(make_small_store(task_of("shop", index)).goal.product_id)] += 1
    assert all(200 <= places[place] <= 300 for place in range(4)), places


@pytest.mark.parametrize(("make_store", "num_tasks"), [(make_small_store, 200), (make_full_store, 10)])
def test_only_the_goal_can_earn_the_whole_reward(make_store: Callable[[Task], Store], num_tasks: int) -> None:
    for index in range(num_tasks):
        store = make_store(task_of("shop", index))
        perfect = [
            product.product_id
            for product in store.products
            if any(
                purchase_reward(product, store.goal, dict(zip(product.options, values, strict=True))) == 1.0
                for values in combinations(*product.options.values())
            )
        ]
        assert perfect == [store.goal.product_id]


@pytest.mark.parametrize(("make_store", "num_tasks"), [(make_small_store, 100), (make_full_store, 5)])
def test_no_value_is_in_two_options_or_is_also_a_link(make_store: Callable[[Task], Store], num_tasks: int) -> None:
    for index in range(num_tasks):
        for product in make_store(task_of("shop", index)).products:
            targets = clickables(replace(STORE, products=(product,)), Page(results=(0,), product=0), page_size=1)
            assert len(set(targets)) == len(targets)


def test_the_small_profile_needs_few_words() -> None:
    env, vocabulary = ShopEnv(), set()
    for index in range(200):
        observation = asyncio.run(env.reset(task_of("shop", index)))
        episode = [observation.messages[0].content]
        while not observation.done:
            episode.append(env.expert())
            observation = asyncio.run(env.step(episode[-1]))
            episode.append(observation.messages[0].content)
        episode_words = re.findall(r"\w+|[^\w\s]", " ".join(episode))
        vocabulary.update(episode_words)
        assert len(episode_words) == 84
        assert len(episode) == 11
    assert len(vocabulary) == 52
