"""The household: the effect and text of each verb, when a task is won, and the planner in unusual states."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from slipstream.envhub.household.house import HAND, State, act, admissible, is_won
from slipstream.envhub.household.household import HouseholdEnv
from slipstream.envhub.household.household_task import TASK_TYPES, Goal, Room, kind_of, make_room
from tests.envhub.env_cases import task_of

HELD = ("go to desk 1", "take mug 1 from desk 1")
CLEANED = ("go to sinkbasin 1", "clean mug 1 with sinkbasin 1")
HEATED = ("go to microwave 1", "heat mug 1 with microwave 1")
COOLED = ("go to fridge 1", "cool mug 1 with fridge 1")
OBJECTS = {"apple 1": "fridge 1", "book 1": "desk 1", "mug 1": "desk 1", "mug 2": "drawer 1"}


def room(task_type: str = "pick_and_place", object_kind: str = "mug", place_kind: str = "drawer") -> Room:
    return Room(
        receptacles=("desk 1", "drawer 1", "fridge 1", "microwave 1", "sinkbasin 1"),
        objects=OBJECTS,
        lamp_place="desk 1",
        goal=Goal(task_type=task_type, object_kind=object_kind, place_kind=place_kind),
        sentence="",
    )


def after(*actions: str, at: Room | None = None) -> tuple[State, str]:
    here = at or room()
    state, text = State(places=here.objects), ""
    for action in actions:
        change = act(here, state, action)
        assert change is not None, action
        state, text = change.state, change.text
    return state, text


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        (["go to desk 1"], "You arrive at desk 1. On the desk 1, you see a book 1, a mug 1, and a desklamp 1."),
        (["go to drawer 1"], "You arrive at drawer 1. The drawer 1 is closed."),
        (["go to sinkbasin 1"], "You arrive at sinkbasin 1. In the sinkbasin 1, you see nothing."),
        (["go to drawer 1", "open drawer 1"], "You open the drawer 1. The drawer 1 is open. In it, you see a mug 2."),
        (["go to drawer 1", "open drawer 1", "close drawer 1"], "You close the drawer 1."),
        ([*HELD], "You pick up the mug 1 from the desk 1."),
        ([*HELD, "look"], "You are facing the desk 1. On the desk 1, you see a book 1, and a desklamp 1."),
        ([*HELD, "move mug 1 to desk 1"], "You move the mug 1 to the desk 1."),
        ([*HELD, "inventory"], "You are carrying: a mug 1."),
        (["inventory"], "You are not carrying anything."),
        (["go to desk 1", "use desklamp 1"], "You turn on the desklamp 1."),
        (["go to desk 1", "examine desk 1"], "On the desk 1, you see a book 1, a mug 1, and a desklamp 1."),
        (["go to fridge 1", "examine fridge 1"], "The fridge 1 is closed."),
        ([*HELD, "examine mug 1"], "There's nothing special about mug 1."),
        ([*HELD, *COOLED], "You cool the mug 1 using the fridge 1."),
        ([*HELD, *CLEANED, *HEATED, "examine mug 1"], "This is a clean and hot mug 1."),
        (
            ["look"],
            "You are in the middle of a room. Looking quickly around you, you see a desk 1, a drawer 1, "
            "a fridge 1, a microwave 1, and a sinkbasin 1.",
        ),
        (["  Go  to DESK 1 "], "You arrive at desk 1. On the desk 1, you see a book 1, a mug 1, and a desklamp 1."),
    ],
)
def test_each_verb_answers_with_the_text_of_alfworld(actions: list[str], text: str) -> None:
    assert after(*actions)[1] == text


AT_DESK = ["take mug 2 from desk 1", "take desklamp 1 from desk 1", "use desklamp 2", "examine mug 1"]


@pytest.mark.parametrize(
    ("actions", "invalid"),
    [
        ([], ["go to drawer 2", "open drawer 1", "take mug 1 from desk 1"]),  # one does not exist, two are far
        (["go to desk 1"], ["go to desk 1", "open desk 1", *AT_DESK]),
        (["go to desk 1", "use desklamp 1"], ["use desklamp 1"]),
        (["go to drawer 1"], ["take mug 2 from drawer 1", "close drawer 1"]),  # it is closed
        (HELD, ["take book 1 from desk 1"]),  # the hand is full
        (HELD, ["move mug 1 to drawer 1", "heat mug 1 with microwave 1"]),  # they are far
        ([*HELD, "go to drawer 1"], ["move mug 1 to drawer 1"]),  # it is closed
        ([*HELD, "go to microwave 1"], ["cool mug 1 with microwave 1"]),
        (["go to desk 1", "take book 1 from desk 1", "go to microwave 1"], ["heat book 1 with microwave 1"]),
    ],
)
def test_an_invalid_action_does_nothing(actions: Sequence[str], invalid: list[str]) -> None:
    state, _ = after(*actions)
    assert [act(room(), state, action) for action in invalid] == [None] * len(invalid)
    assert not set(invalid) & set(admissible(room(), state))


def test_heating_undoes_cooling_and_cooling_undoes_heating() -> None:
    cooled, _ = after(*HELD, *HEATED, *COOLED)
    assert (cooled.hot, cooled.cool) == (frozenset(), frozenset({"mug 1"}))
    reheated = act(room(), replace(cooled, location="microwave 1"), "heat mug 1 with microwave 1")
    assert reheated is not None
    assert (reheated.state.hot, reheated.state.cool) == (frozenset({"mug 1"}), frozenset())


def test_the_admissible_actions_are_all_valid_ones() -> None:
    state, _ = after("go to fridge 1", "open fridge 1", "take apple 1 from fridge 1")
    assert admissible(room(), state) == [
        *(f"go to {place} 1" for place in ("desk", "drawer", "microwave", "sinkbasin")),
        "examine fridge 1",
        "close fridge 1",
        "move apple 1 to fridge 1",
        "cool apple 1 with fridge 1",
        "examine apple 1",
        "inventory",
        "look",
    ]


LIT = {"lamp_on": True, "location": "desk 1"}
PLACED, TWO = ("pick_and_place", "apple", "desk"), ("pick_two_obj", "mug", "desk")
LOOK = ("look_at_obj_in_light", "book", "")


@pytest.mark.parametrize(
    ("goal", "places", "changes", "won"),
    [
        (PLACED, {}, {}, False),
        (PLACED, {"apple 1": HAND}, {}, False),
        (PLACED, {"apple 1": "desk 1"}, {}, True),
        (TWO, {}, {}, False),
        (TWO, {"mug 2": "desk 1"}, {}, True),
        (LOOK, {}, LIT, False),
        (LOOK, {"book 1": HAND}, LIT, True),
        (LOOK, {"mug 1": HAND}, LIT, False),
        (LOOK, {"book 1": HAND}, LIT | {"lamp_on": False}, False),
        (LOOK, {"book 1": HAND}, LIT | {"location": "drawer 1"}, False),
    ],
)
def test_a_task_is_won_in_these_states_and_no_others(
    goal: tuple[str, str, str], places: dict[str, str], changes: dict[str, Any], won: bool
) -> None:
    assert is_won(room(*goal), replace(State(places=OBJECTS | places), **changes)) == won


@pytest.mark.parametrize(
    ("task_type", "field"),
    [("pick_clean_then_place", "clean"), ("pick_heat_then_place", "hot"), ("pick_cool_then_place", "cool")],
)
def test_a_treated_object_wins_and_an_untreated_one_does_not(task_type: str, field: str) -> None:
    here = room(task_type)
    state = State(places=here.objects)  # mug 2 lies in the drawer already, untreated
    treated = replace(state, **{field: frozenset({"mug 1"})})
    assert not is_won(here, state)
    assert not is_won(here, treated)
    assert is_won(here, replace(treated, places=here.objects | {"mug 1": "drawer 1"}))


def test_every_task_type_is_drawn_and_can_be_configured_alone() -> None:
    tasks = [task_of("household", index) for index in range(200)]
    made = {make_room(task, profile="small", task_types=TASK_TYPES).goal.task_type for task in tasks}
    assert made == set(TASK_TYPES)
    for task_type in TASK_TYPES:
        alone = {make_room(task, profile="small", task_types=(task_type,)).goal.task_type for task in tasks[:20]}
        assert alone == {task_type}


@pytest.mark.parametrize("profile", ["small", "full"])
def test_no_task_is_won_at_its_start_and_its_text_names_no_receptacle(profile: str) -> None:
    for index in range(200):
        here = make_room(task_of("household", index), profile=profile, task_types=TASK_TYPES)
        assert not is_won(here, State(places=here.objects))
        numbered = [name for name in here.objects if name in here.sentence]
        told = [name for name in here.receptacles if name in here.sentence]
        assert (numbered, told) == ([], [])
        lying = {here.objects[name] for name in here.objects if kind_of(name) == here.goal.object_kind}
        assert not any(kind_of(place) == here.goal.place_kind for place in lying)


def test_the_order_of_task_types_does_not_matter() -> None:
    task = task_of("household", 3)
    one = asyncio.run(HouseholdEnv(task_types=["pick_two_obj", "pick_and_place"]).reset(task))
    other = asyncio.run(HouseholdEnv(task_types=["pick_and_place", "pick_two_obj"]).reset(task))
    assert one == other
