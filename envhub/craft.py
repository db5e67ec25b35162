"""`craft`: get raw items and combine them by recipes until the requested item is made.

The game is TextCraft's (https://arxiv.org/abs/2311.05772). The recipes are drawn at random for each task.
"""

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_range
from slipstream.envhub.name_list import name_list
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.world import Change, InvalidAction, WorldEnv, rules_in

RAW = ("log", "stone", "clay", "sand", "wool", "iron", "gold", "coal", "reed", "bone", "hide", "wax")
CRAFTED = name_list(
    """
    plank, brick, glass, string, nail, ring, torch, paper, glue, strap, candle, tile, table, wall, lamp, rug,
    hammer, crown, oven, book, flute, saddle, chest, pot, cart, tower, mirror, loom, anvil, clock, forge,
    library, organ, harness, shop, kiln
    """
)
MAX_GET = 9
MAX_HELD = 99
NUM_DISTRACTORS = 2  # useless recipes
RULES = (
    "You make things. `get N THING` gets a raw thing, which no recipe makes. `craft N THING using N THING, ...` "
    "follows a recipe exactly as it is written, and uses up its ingredients. `inventory` shows what you have."
)

_GET = re.compile(r"\s*get\s+(\d+)\s+(\w+)\s*", re.IGNORECASE | re.ASCII)
_CRAFT = re.compile(r"\s*craft\s+(\d+)\s+(\w+)\s+using\s([\w\s,]+)", re.IGNORECASE | re.ASCII)
_INGREDIENT = re.compile(r"\s*(\d+)\s+(\w+)\s*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    makes: int
    item: str
    uses: Mapping[str, int]

    def __str__(self) -> str:
        uses = ", ".join(f"{count} {item}" for item, count in self.uses.items())
        return f"craft {self.makes} {self.item} using {uses}"


class CraftState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    held: dict[str, int] = {}  # at least one of each


@dataclass(frozen=True, kw_only=True, slots=True)
class CraftWorld:
    """The recipes of a task, and the item to make."""

    goal: str
    recipes: dict[str, Recipe]  # by the item that they make, in the order of the opening text
    first: CraftState = field(default_factory=CraftState)

    @property
    def raw(self) -> list[str]:
        return sorted({item for recipe in self.recipes.values() for item in recipe.uses} - self.recipes.keys())

    @property
    def opening(self) -> str:
        return "\n".join([*map(str, self.recipes.values()), f"make {self.goal}"])

    async def act(self, state: CraftState, action: str) -> Change[CraftState]:
        if action.strip().lower() == "inventory":
            held = ", ".join(f"{count} {item}" for item, count in sorted(state.held.items()))
            return Change(state=state, text=held or "nothing")
        if found := _GET.fullmatch(action):
            return self._get(state, found[2].lower(), found[1])
        if found := _CRAFT.fullmatch(action):
            return self._craft(state, found[2].lower(), found[1], found[3])
        raise InvalidAction("no such action")

    def admissible(self, state: CraftState) -> list[str]:
        gets = [f"get 1 {item}" for item in self.raw if state.held.get(item, 0) < MAX_HELD]
        crafts = [str(recipe) for recipe in self.recipes.values() if _can_make(state, recipe)]
        return [*gets, *crafts, "inventory"]

    def expert(self, state: CraftState) -> str:
        return _plan(self.recipes, self.goal, state.held)[0]

    def _get(self, state: CraftState, item: str, digits: str) -> Change[CraftState]:
        if item not in self.raw or len(digits) > 2 or not 1 <= int(digits) <= MAX_GET:
            raise InvalidAction(f"cannot get {item}")
        if state.held.get(item, 0) + int(digits) > MAX_HELD:
            raise InvalidAction(f"too many {item}")
        return Change(state=_with(state, {item: int(digits)}), text=f"got {int(digits)} {item}")

    def _craft(self, state: CraftState, item: str, digits: str, using: str) -> Change[CraftState]:
        matches = [_INGREDIENT.fullmatch(ingredient) for ingredient in using.split(",")]
        ingredients = {match[2].lower(): match[1] for match in matches if match is not None}
        recipe = self.recipes.get(item)
        if recipe is None or len(ingredients) != len(matches) or digits != str(recipe.makes):
            raise InvalidAction("no such recipe")
        if ingredients != {used: str(count) for used, count in recipe.uses.items()}:
            raise InvalidAction("no such recipe")
        if not _can_make(state, recipe):
            raise InvalidAction("not enough")
        made = _with(state, {used: -count for used, count in recipe.uses.items()} | {item: recipe.makes})
        over = item == self.goal
        return Change(state=made, text=f"crafted {recipe.makes} {item}", over=over, score=float(over))


def make_craft_env(*, profile: str = "small", depth: int = 2) -> Env:
    """Return a `craft` environment. Raises ValueError for invalid options. `profile`: see `rules_in`.

    `depth`: the number of recipes in a row from raw items to the goal.
    """
    check_range("depth", depth, 1, 4)
    return WorldEnv(
        f"craft {profile} depth={depth}", make_world=partial(make_craft, depth=depth), rules=rules_in(profile, RULES)
    )


def make_craft(task: Task, *, depth: int) -> CraftWorld:
    rng = task_rng(task, world=f"craft/{depth}/{NUM_DISTRACTORS}")
    while True:
        recipes = _draw_recipes(rng, depth)
        shuffled = list(recipes.values())
        rng.shuffle(shuffled)
        world = CraftWorld(goal=list(recipes)[depth - 1], recipes={recipe.item: recipe for recipe in shuffled})
        if split_of(world.opening) == task.split:
            return world


def _draw_recipes(rng: random.Random, depth: int) -> dict[str, Recipe]:
    """Return a chain of `depth` recipes, each using the item that the previous one makes; then the distractors."""
    names = rng.sample(CRAFTED, depth + NUM_DISTRACTORS)
    recipes: dict[str, Recipe] = {}
    for position, item in enumerate(names):
        before = names[position - 1 : position] if 0 < position < depth else []
        # A distractor may use items of the chain. The chain never uses a distractor.
        others = [*rng.sample(RAW, 3), *(names[:depth] if position >= depth else [])]
        chosen = [*before, *rng.sample(others, rng.randint(0 if before else 1, 2))]
        uses = {used: rng.randint(1, 2) for used in chosen}
        recipes[item] = Recipe(makes=rng.choice((1, 1, 2)), item=item, uses=uses)
    return recipes


def _plan(recipes: Mapping[str, Recipe], goal: str, held: Mapping[str, int]) -> list[str]:
    """Return the actions, in order, that craft `goal` once more."""
    stock, actions = dict(held), list[str]()

    def provide(item: str, count: int) -> None:
        used = min(stock.get(item, 0), count)
        stock[item] = stock.get(item, 0) - used
        missing = count - used
        if not missing:
            return
        if item not in recipes:
            actions.extend(f"get {min(MAX_GET, missing - got)} {item}" for got in range(0, missing, MAX_GET))
            return
        recipe = recipes[item]
        times = math.ceil(missing / recipe.makes)
        most = MAX_HELD // max(recipe.uses.values())  # crafts whose ingredients can be held at once
        for now in [most] * (times // most) + [times % most] * (times % most > 0):
            for ingredient, each in recipe.uses.items():
                provide(ingredient, each * now)
            actions.extend([str(recipe)] * now)
        stock[item] += times * recipe.makes - missing

    provide(goal, held.get(goal, 0) + 1)
    return actions


def _can_make(state: CraftState, recipe: Recipe) -> bool:
    has_ingredients = all(state.held.get(item, 0) >= count for item, count in recipe.uses.items())
    return has_ingredients and state.held.get(recipe.item, 0) + recipe.makes <= MAX_HELD


def _with(state: CraftState, changes: Mapping[str, int]) -> CraftState:
    held = dict(state.held)
    for item, change in changes.items():
        held[item] = held.get(item, 0) + change
    return CraftState(held={item: count for item, count in held.items() if count})
