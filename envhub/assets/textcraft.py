"""`textcraft`: TextCraft's goals (https://arxiv.org/abs/2311.05772) from Minecraft's recipes, on `craft`'s engine.

It is simpler than TextCraft in two ways. An ingredient that may be any member of a group is always its first member by
name. An item has one recipe: the first, by file name, that makes no cycle.
"""

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.craft import RULES, CraftWorld, Recipe
from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_range
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.user_files import asset_path, read_json
from slipstream.envhub.world import WorldEnv

FETCH = (
    "give the folder with Minecraft's recipes as JSON files: TextCraft/recipes of github.com/archiki/ADaPT's data, or "
    "data/minecraft/recipes out of a Minecraft 1.16 to 1.20 server's jar"
)
NUM_DISTRACTORS = 10  # useless recipes, at most
SHAPED, SHAPELESS = "minecraft:crafting_shaped", "minecraft:crafting_shapeless"


class _Ingredient(msgspec.Struct):
    """An item, or any of a group of them, a tag."""

    item: str = ""
    tag: str = ""

    def __post_init__(self) -> None:
        if not self.item and not self.tag:
            raise ValueError("an ingredient must have an item or a tag")


Ingredient = _Ingredient | Annotated[list[_Ingredient], msgspec.Meta(min_length=1)]  # of alternatives the first is used


class _Result(msgspec.Struct):
    item: str
    count: Annotated[int, msgspec.Meta(ge=1)] = 1


class _RecipeFile(msgspec.Struct):
    type: str


class _Craft(msgspec.Struct):
    """A recipe of one of the types that are crafted."""

    type: str
    result: _Result | str
    group: str = ""
    pattern: list[str] = []
    key: dict[str, Ingredient] = {}
    ingredients: list[Ingredient] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Book:
    """All recipes by the item that they make, and each item's depth: the crafts it takes from found items."""

    recipes: dict[str, Recipe]
    depths: dict[str, int]

    def chain(self, goal: str) -> list[str]:
        """Return all items that must be crafted for `goal`, with `goal` itself."""
        return [item for item in _below(self.recipes, [goal]) if item in self.recipes]


def make_textcraft_env(*, recipes: str = "", depth: int = 2) -> Env:
    """Make an environment of TextCraft's goals. Raises ValueError if recipes are missing, or no goal is deep enough.

    `recipes` is the folder of Minecraft's recipes, `depth` the smallest number of consecutive crafts for a goal. A
    goal's name decides its split.
    """
    check_range("depth", depth, 1, 8)
    book = read_book(asset_path("recipes", recipes, fetch=FETCH))
    goals = {
        split: sorted(item for item, its in book.depths.items() if its >= depth and split_of(item) == split)
        for split in ("train", "held_out")
    }
    if not all(goals.values()):
        raise ValueError(
            f"`env.options.recipes`: {recipes} has no goals of depth {depth} in one of the splits; use a smaller "
            f"`depth`, or {FETCH}"
        )
    return WorldEnv(
        f"textcraft {recipes} depth={depth}", make_world=partial(make_textcraft, book=book, goals=goals), rules=RULES
    )


def make_textcraft(task: Task, *, book: Book, goals: dict[str, list[str]]) -> CraftWorld:
    rng = task_rng(task, world="textcraft")
    goal = goals[task.split][task.index % len(goals[task.split])]
    chain = book.chain(goal)
    # A distractor uses only items that are found or in the chain: otherwise `get` would give an item to be crafted.
    others = [
        recipe
        for item, recipe in book.recipes.items()
        if item not in chain
        and any(used in chain or used in book.recipes[goal].uses for used in recipe.uses)
        and all(used in chain or used not in book.recipes for used in recipe.uses)
    ]
    shown = [book.recipes[item] for item in chain] + rng.sample(others, min(NUM_DISTRACTORS, len(others)))
    rng.shuffle(shown)
    return CraftWorld(goal=goal, recipes={recipe.item: recipe for recipe in shown})


@functools.lru_cache(maxsize=4)
def read_book(folder: Path) -> Book:
    """Return the recipes of a folder. Raises ValueError for a malformed file."""
    paths = [path for path in sorted(folder.glob("*.json")) if read_json(path, _RecipeFile).type in (SHAPED, SHAPELESS)]
    crafts = [read_json(path, _Craft) for path in paths]
    members: dict[str, list[str]] = {}
    for made in crafts:
        if made.group:
            members.setdefault(made.group, []).append(_result(made)[0])
    recipes: dict[str, Recipe] = {}
    depths: dict[str, int] = {}
    for path, made in zip(paths, crafts, strict=True):
        item, count = _result(made)
        uses = _uses(made, members)
        if not uses:
            raise ValueError(f"{path}: a recipe must have ingredients; {FETCH}")
        is_unpacked = len(uses) == 1 and next(iter(uses)).endswith("_block")
        if item in recipes or is_unpacked or item in _below(recipes, uses):
            continue
        recipes[item] = Recipe(makes=count, item=item, uses=dict(uses))
    for item in recipes:
        _depth(item, recipes, depths)
    return Book(recipes=recipes, depths=depths)


def _result(made: _Craft) -> tuple[str, int]:
    result = _Result(item=made.result) if isinstance(made.result, str) else made.result
    return _name(result.item), result.count


def _uses(made: _Craft, members: dict[str, list[str]]) -> Counter[str]:
    if made.type == SHAPED:
        signs = Counter("".join(made.pattern))
        each = [(ingredient, signs[sign]) for sign, ingredient in made.key.items()]
    else:
        each = [(ingredient, 1) for ingredient in made.ingredients]
    uses: Counter[str] = Counter()
    for ingredient, count in each:
        first = ingredient[0] if isinstance(ingredient, list) else ingredient
        name = _name(first.item or first.tag)
        uses[name if first.item else min(members.get(name, [name]))] += count
    return +uses  # without signs that the pattern does not have


def _below(recipes: dict[str, Recipe], items: Iterable[str]) -> dict[str, None]:
    """Return `items`, and all that the recipes so far make them from, each once."""
    found, waiting = dict[str, None](), list(items)
    while waiting:
        item = waiting.pop()
        if item not in found:
            found[item] = None
            waiting += recipes[item].uses if item in recipes else ()
    return found


def _depth(item: str, recipes: dict[str, Recipe], depths: dict[str, int]) -> int:
    """Return the number of consecutive crafts for `item`; there are no cycles."""
    if item not in recipes:
        return 0
    if item not in depths:
        depths[item] = 1 + max(_depth(used, recipes, depths) for used in recipes[item].uses)
    return depths[item]


def _name(identifier: str) -> str:
    """Return `oak_planks` for `minecraft:oak_planks`: one word, as in a recipe of `craft`."""
    return identifier.rpartition(":")[2].rpartition("/")[2]
