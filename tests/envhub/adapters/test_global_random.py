"""The global random generators, from which some packages draw their tasks in a thread of an actor."""

import ast
import random
from pathlib import Path

import pytest

from slipstream.envhub.adapters.global_random import GlobalRandom

REPOSITORY = Path(__file__).parents[3]
OWN = {"Random", "SystemRandom"}  # generators of one's own


def test_an_episode_continues_its_own_numbers_and_leaves_those_of_others_alone() -> None:
    one, other, before = GlobalRandom(1), GlobalRandom(2), random.getstate()
    drawn = list[float]()
    for episode in (one, other, one):
        with episode.within():
            drawn.append(random.random())
    alone = random.Random(1)
    assert [drawn[0], drawn[2]] == [alone.random(), alone.random()] and drawn[1] == random.Random(2).random()
    assert random.getstate() == before


PLUGIN = REPOSITORY / "envhub/assets/swebench_plugin.py"  # runs in a process of an instance's


@pytest.mark.parametrize("room", ["actors", "common", "envhub", "replay"])
def test_nothing_of_ours_draws_from_the_global_generator(room: str) -> None:
    """A draw of the event loop, while a task is drawn in a thread, would change the task: siblings would differ."""
    for path in {*(REPOSITORY / room).rglob("*.py")} - {PLUGIN}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
                where = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                assert node.attr in OWN or path.stem == "global_random", f"{where}: random.{node.attr}"
