"""ALFWorld's real engine, on chores in its own language that are written here: `make test-adapters` runs it.

Its domain and its grammar are in the package; the rooms of the benchmark are not: `alfworld-download` fetches them.
"""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

from tests.adapters.held import USUAL
from tests.envhub import test_env_contract as contract
from tests.envhub.env_cases import Case, rollout

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own

CHECKS = [*USUAL, contract.test_every_admissible_action_is_understood]
PLACES = {
    "countertop_bar_1": "CounterTop",
    "fridge_bar_1": "Fridge",
    "cabinet_bar_1": "Cabinet",
    "sink_bar_1_bar_sinkbasin": "SinkBasin",
    "microwave_bar_1": "Microwave",
}
CHORES = {"put a clean mug in cabinet": "(isClean ?o)", "put a hot mug in cabinet": "(isHot ?o)"}
CHORES |= {"put a mug in cabinet": ""}


def problem(condition: str) -> str:
    """A kitchen with a mug on the counter, in PDDL."""
    locations = " ".join(f"loc_bar_{number}" for number in range(len(PLACES) + 1))
    facts = [
        f"(receptacleAtLocation {name} loc_bar_{number}) (receptacleType {name} {kind}Type) "
        f"(canContain {kind}Type MugType)"
        for number, (name, kind) in enumerate(PLACES.items(), 1)
    ]
    return f"""(define (problem chore) (:domain alfred)
      (:objects agent1 - agent mug_bar_1 - object {" ".join(PLACES)} - receptacle {locations} - location
        MugType KnifeType ButterKnifeType - otype {" ".join(f"{kind}Type" for kind in PLACES.values())} - rtype)
      (:init (atLocation agent1 loc_bar_0) {" ".join(facts)} (openable fridge_bar_1) (openable cabinet_bar_1)
        (openable microwave_bar_1) (objectType mug_bar_1 MugType) (pickupable mug_bar_1) (cleanable mug_bar_1)
        (heatable mug_bar_1) (inReceptacle mug_bar_1 countertop_bar_1) (objectAtLocation mug_bar_1 loc_bar_1)
        (= (total-cost) 0))
      (:goal (and (exists (?r - receptacle ?o - object) (and (inReceptacle ?o ?r) (objectType ?o MugType)
        (receptacleType ?r CabinetType) {condition}))))
      (:metric minimize (total-cost)))"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As json_2.1.1/train: a folder for each game, some of which ALFWorld leaves out."""
    folder = tmp_path_factory.mktemp("train")
    domain, grammar = Path(ALFRED_PDDL_PATH).read_text(), Path(ALFRED_TWL2_PATH).read_text()
    for number, (task, condition) in enumerate(CHORES.items()):
        game = {"pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", task), "walkthrough": []}
        for name in (f"trial{number}", f"trial{number}-movable", f"unsolved{number}"):
            game |= {"pddl_problem": problem(condition), "solvable": name.startswith("trial")}
            (folder / name).mkdir()
            (folder / name / "game.tw-pddl").write_text(json.dumps(game))
    return folder


@pytest.fixture
def case(folder: Path) -> Case:
    options = {"train": str(folder), "held_out": str(folder)}
    return Case("textworld", max_turns=20, noisy_success=0, share=0.01, options=options)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_alfworld_keeps_the_contract(check: Callable[[Case], None], case: Case) -> None:
    check(case)


def test_its_planner_wins_every_chore(case: Case) -> None:
    env, openings = case.make(), []
    for index in range(3):
        observations = asyncio.run(rollout(env, case, case.task("train", index), random.Random(0), noise=0))
        assert (observations[-1].success, observations[-1].score) == (True, 1.0)
        openings.append(observations[0].messages[0].content)
    assert [opening.splitlines()[-1] for opening in openings] == [f"Your task is to: {task}." for task in CHORES]


def test_a_chore_reads_as_in_alfworld(case: Case) -> None:
    env = case.make()
    opening = asyncio.run(env.reset(case.task("train", 0))).messages[0].content
    assert opening.splitlines()[0] == "-= Welcome to TextWorld, ALFRED! =-"
    assert "You are in the middle of a room." in opening and "a countertop 1" in opening
    actions = ["go to countertop 1", "take mug 1 from countertop 1", "go to sinkbasin 1"]
    actions += ["clean mug 1 with sinkbasin 1", "fly"]
    said = [asyncio.run(env.step(action)).messages[0].content for action in actions]
    assert "you see a mug 1" in said[0]
    assert said[1:] == [
        "You pick up the mug 1 from the countertop 1.",
        "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.",
        "You clean the mug 1 using the sinkbasin 1.",
        "Nothing happens.",
    ]
    assert "move mug 1 to sinkbasin 1" in (env.admissible() or [])
    asyncio.run(env.close())
