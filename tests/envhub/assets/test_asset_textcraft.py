"""TextCraft's goals, from recipes in Minecraft's own form that are written here."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.records.trajectory import Task
from slipstream.envhub.assets.textcraft import make_textcraft, read_book
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.task_seed import split_of
from tests.adapters.held import USUAL, keeps
from tests.envhub import test_env_contract as contract
from tests.envhub.env_cases import Case

CHECKS = [
    *USUAL,
    contract.test_the_expert_solves_its_tasks,
    contract.test_the_expert_copes_with_its_own_mistakes,
    contract.test_every_admissible_action_is_understood,
]
WOODS = ("oak", "birch", "acacia", "spruce", "jungle", "dark_oak", "crimson", "warped", "cherry", "mangrove")


def recipe(kind: str, result: str, count: int = 1, group: str = "", **fields: Any) -> dict[str, Any]:
    made = {"item": f"minecraft:{result}", "count": count}
    return {"type": f"minecraft:crafting_{kind}", "group": group, "result": made, **fields}


def shaped(result: str, pattern: list[str], key: dict[str, Any], count: int = 1) -> dict[str, Any]:
    return recipe("shaped", result, count, pattern=pattern, key=key)


def shapeless(result: str, ingredients: list[Any], count: int = 1, group: str = "") -> dict[str, Any]:
    return recipe("shapeless", result, count, group, ingredients=ingredients)


def item(name: str) -> dict[str, str]:
    return {"item": f"minecraft:{name}"}


LOGS, SIGN, STICK = {"tag": "minecraft:logs"}, ["###", "###", " X "], item("stick")
RECIPES = (
    {
        "stick": shaped("stick", ["#", "#"], {"#": {"tag": "minecraft:planks"}}, 4),
        "torch": shaped("torch", ["X", "#"], {"X": [item("coal"), item("charcoal")], "#": STICK}, 4),
        "iron_block": shaped("iron_block", ["###", "###", "###"], {"#": item("iron_ingot")}),
        "iron_ingot": shapeless("iron_ingot", [item("iron_block")], 9),
        "book": shapeless("book", [item("paper"), item("paper"), item("paper"), item("leather")]),
        "smelted": {"type": "minecraft:smelting", "ingredient": item("sand"), "result": "minecraft:glass"},
        "campfire": shaped("campfire", [" S ", "SCS", "LLL"], {"S": STICK, "C": item("coal"), "L": LOGS}),
        "lever": shaped("lever", ["#"], {"#": item("stone"), "X": STICK}),
        "dye": {"type": "minecraft:crafting_shapeless", "ingredients": [item("bone")], "result": "minecraft:dye"},
    }
    | {f"{wood}_planks": shapeless(f"{wood}_planks", [item(f"{wood}_log")], 4, "planks") for wood in WOODS}
    | {f"{wood}_sign": shaped(f"{wood}_sign", SIGN, {"#": item(f"{wood}_planks"), "X": STICK}, 3) for wood in WOODS}
)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for name, recipe in RECIPES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(recipe))
    return str(tmp_path)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_textcraft_keeps_the_contract(check: Callable[..., None], folder: str) -> None:
    keeps(check, Case("textcraft", 80, 1.0, {"recipes": folder}, share=0.05), splits=("train", "held_out"))


def test_recipes_are_read_as_minecraft_writes_them(folder: str) -> None:
    book = read_book(Path(folder))
    assert str(book.recipes["stick"]) == "craft 4 stick using 2 acacia_planks"  # of the group, the first by name
    assert str(book.recipes["torch"]) == "craft 4 torch using 1 coal, 1 stick"  # of the list, the first
    assert str(book.recipes["book"]) == "craft 1 book using 3 paper, 1 leather"
    assert str(book.recipes["campfire"]) == "craft 1 campfire using 3 stick, 1 coal, 3 logs"  # logs are not crafted
    assert str(book.recipes["lever"]) == "craft 1 lever using 1 stone"  # its pattern has no stick
    assert str(book.recipes["dye"]) == "craft 1 dye using 1 bone"
    assert str(book.recipes["iron_block"]) == "craft 1 iron_block using 9 iron_ingot"
    assert "iron_ingot" not in book.recipes and "glass" not in book.recipes  # a block unpacked; smelted
    assert [book.depths[name] for name in ("acacia_planks", "stick", "torch", "oak_sign")] == [1, 2, 3, 3]


def test_the_expert_makes_what_takes_more_than_can_be_held(tmp_path: Path) -> None:
    """12 parts of 9 nuggets each: 108 nuggets, of which 99 can be held."""
    recipes = {
        "part": shapeless("part", [item("nugget")] * 9, 1),
        "engine": shaped("engine", ["###", "###"], {"#": item("part")}, 1),
        "ship": shapeless("ship", [item("engine"), item("engine")], 1),
    }
    for name, recipe in recipes.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(recipe))
    book = read_book(tmp_path)
    world = make_textcraft(Task(env="textcraft", split="train", index=0), book=book, goals={"train": ["ship"]})
    state, score = world.first, 0.0
    for _ in range(40):
        change = asyncio.run(world.act(state, world.expert(state)))
        state, score = change.state, change.score
        if change.over:
            break
    assert score == 1.0


def test_a_goal_is_deep_enough_and_of_its_split_and_what_is_crafted_cannot_be_found(folder: str) -> None:
    book = read_book(Path(folder))
    env = make_env("textcraft", {"recipes": folder, "depth": 3})
    for split in ("train", "held_out"):
        for index in range(12):
            opening = asyncio.run(env.reset(Task(env="textcraft", split=split, index=index)))
            *told, asked = opening.messages[1].content.splitlines()
            goal = asked.removeprefix("make ")
            assert split_of(goal) == split and book.depths[goal] >= 3
            chain = {str(book.recipes[name]) for name in book.chain(goal)}
            assert chain < set(told) and len(chain) < len(told) <= len(chain) + 3
            refused = [asyncio.run(env.step(f"get 1 {name}")) for name in book.recipes]
            assert not any(observation.valid_action for observation in refused)


def test_what_is_missing_is_said_with_what_to_fetch(folder: str) -> None:
    why = r"`env\.options\.recipes` must be set; give the folder with Minecraft's recipes"
    with pytest.raises(ValueError, match=why):
        make_env("textcraft", {})
    with pytest.raises(ValueError, match="has no goals of depth 7"):
        make_env("textcraft", {"recipes": folder, "depth": 7})


@pytest.mark.parametrize(
    "recipe",
    [
        {"result": 3},
        shaped("torch", ["X"], {"X": item("coal")}) | {"result": {"id": "minecraft:torch"}},  # Minecraft's from 1.20.5
        shaped("torch", ["X"], {"X": "minecraft:coal"}),  # from 1.21.2
        shapeless("torch", [[]]),
        shapeless("torch", []),
        shapeless("torch", [item("coal")], 0),
        shapeless("torch", [{"count": 2}]),
    ],
)
def test_a_recipe_of_another_form_is_named(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(recipe))
    with pytest.raises(ValueError, match=r"x\.json: "):
        make_env("textcraft", {"recipes": str(tmp_path)})
