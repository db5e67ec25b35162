"""Craft: which items `get` gives, what a craft uses up, and when the goal is made."""

from slipstream.envhub.craft import CraftState, CraftWorld, Recipe, make_craft
from slipstream.envhub.world import Change
from tests.envhub import env_cases

WORLD = CraftWorld(
    goal="table",
    recipes={
        "table": Recipe(makes=1, item="table", uses={"plank": 3, "nail": 1}),
        "plank": Recipe(makes=2, item="plank", uses={"log": 1}),
        "nail": Recipe(makes=1, item="nail", uses={"iron": 2}),
    },
)


def act(held: dict[str, int], action: str) -> Change[CraftState]:
    return env_cases.act(WORLD, action, CraftState(held=held))


def test_get_gives_only_raw_items_and_at_most_nine_at_once() -> None:
    assert act({}, "get 3 log").state.held == {"log": 3}
    assert act({"log": 1}, "get 9 log").state.held == {"log": 10}
    assert not any(act({}, action).valid for action in ("get 1 plank", "get 10 log", "get 0 log"))
    assert not act({"log": 95}, "get 9 log").valid


def test_a_craft_uses_up_its_ingredients_and_makes_the_item() -> None:
    change = act({"log": 2}, "craft 2 plank using 1 log")
    assert (change.state.held, change.text, change.over) == ({"log": 1, "plank": 2}, "crafted 2 plank", False)
    assert act({"log": 1}, "craft 2 plank using 1 log").state.held == {"plank": 2}


def test_a_recipe_must_match_exactly_but_in_any_order_of_ingredients() -> None:
    held = {"plank": 3, "nail": 1}
    made = act(held, "craft 1 table using 1 nail, 3 plank")
    assert (made.over, made.score, made.state.held) == (True, 1.0, {"table": 1})
    for wrong in (
        *("craft 1 table using 3 plank", "craft 1 table using 3 plank, 1 nail, 1 log"),
        *("craft 1 table using 1 nail, 1 nail", "craft 1 table using 2 plank, 1 nail"),
        *("craft 2 table using 3 plank, 1 nail", "craft 1 plank using 1 log", "craft 1 moon using 1 log"),
    ):
        assert (act(held, wrong).text, act(held, wrong).valid) == ("no such recipe", False)
    assert act({"plank": 2, "nail": 1}, "craft 1 table using 3 plank, 1 nail").text == "not enough"


def test_the_inventory_lists_the_items() -> None:
    assert act({}, "inventory").text == "nothing"
    assert act({"plank": 2, "log": 1}, "inventory").text == "1 log, 2 plank"


def test_depth_is_the_number_of_crafts_in_a_row() -> None:
    for depth in (1, 2, 3, 4):
        world = make_craft(env_cases.task_of("craft", 5), depth=depth)
        assert len(world.recipes) == depth + 2

        def height(item: str, recipes: dict[str, Recipe] = world.recipes) -> int:
            return 1 + max(height(part) for part in recipes[item].uses) if item in recipes else 0

        assert height(world.goal) == depth
