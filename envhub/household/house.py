"""The actions in a room and their results, with ALFWorld's verbs and sentences (Shridhar et al., 2021).

A state is a value, and an action returns a new one. As in ALFWorld, the agent can hold one object, a closed receptacle
hides its content, and an appliance works in one step, even when it is closed.
"""

import re
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from slipstream.envhub.household.household_task import (
    LOOK_AT_OBJ_IN_LIGHT,
    PICK_TWO_OBJ,
    TREATMENTS,
    Room,
    in_on,
    kind_of,
    listed,
)
from slipstream.envhub.household.rooms import LAMP, OPENABLE
from slipstream.envhub.world import Change

HAND = "hand"
LAMP_NAME = f"{LAMP} 1"
VERBS = (
    "go to X, open X, close X, take O from X, move O to X, clean O with X, heat O with X, cool O with X, "
    f"use {LAMP_NAME}, examine X, inventory, look"
)


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that an episode changes."""

    location: str = ""  # a receptacle; empty in the middle of the room
    places: dict[str, str]  # object -> receptacle or HAND
    opened: frozenset[str] = frozenset()  # receptacles
    clean: frozenset[str] = frozenset()  # objects
    hot: frozenset[str] = frozenset()
    cool: frozenset[str] = frozenset()
    lamp_on: bool = False

    @property
    def held(self) -> str:
        """The object in the hand; "" if the hand is empty."""
        return next((name for name, place in self.places.items() if place == HAND), "")


def is_shut(state: State, receptacle: str) -> bool:
    return kind_of(receptacle) in OPENABLE and receptacle not in state.opened


def inside(state: State, receptacle: str) -> tuple[str, ...]:
    """Return the objects in or on a receptacle, hidden or not."""
    return tuple(name for name, place in state.places.items() if place == receptacle)


def treated(state: State, result: str) -> frozenset[str]:
    """Return the objects with the property `result`: "clean", "hot" or "cool"."""
    return {"clean": state.clean, "hot": state.hot, "cool": state.cool}[result]


def is_won(room: Room, state: State) -> bool:
    goal = room.goal
    if goal.task_type == LOOK_AT_OBJ_IN_LIGHT:
        return state.lamp_on and state.location == room.lamp_place and kind_of(state.held) == goal.object_kind
    num_wanted = 2 if goal.task_type == PICK_TWO_OBJ else 1
    places = [name for name in room.receptacles if kind_of(name) == goal.place_kind]
    return any(len(delivered(room, state, place)) >= num_wanted for place in places)


def delivered(room: Room, state: State, place: str) -> list[str]:
    """Return the objects in `place` that satisfy the goal."""
    return [name for name in inside(state, place) if is_ready(room, state, name)]


def is_ready(room: Room, state: State, name: str) -> bool:
    """Return whether an object is of the goal's kind and has had the treatment of the goal."""
    treatment = room.goal.treatment
    return kind_of(name) == room.goal.object_kind and (treatment is None or name in treated(state, treatment.result))


def act(room: Room, state: State, action: str) -> Change[State] | None:
    """Do `action`; return None if nothing happens."""
    sentence = " ".join(action.lower().split())
    for pattern, rule in _RULES:
        found = pattern.fullmatch(sentence)
        if found is not None:
            return rule(room, state, *found.groups())
    return None


def admissible(room: Room, state: State) -> list[str]:
    """Return the actions that change the state or show something."""
    actions = [f"go to {name}" for name in room.receptacles if name != state.location]
    held, here = state.held, state.location
    if here:
        actions += _admissible_here(state, here, held)
        actions += [f"{verb} {held} with {here}" for verb in TREATMENTS if held and _is_treatable(held, verb, here)]
        actions += [f"use {LAMP_NAME}"] if here == room.lamp_place and not state.lamp_on else []
    actions += [f"examine {held}"] if held else []
    return [*actions, "inventory", "look"]


def _admissible_here(state: State, here: str, held: str) -> list[str]:
    actions = [f"examine {here}"]
    if kind_of(here) in OPENABLE:
        actions.append(f"open {here}" if is_shut(state, here) else f"close {here}")
    if is_shut(state, here):
        return actions
    if held:
        return [*actions, f"move {held} to {here}"]
    return actions + [f"take {name} from {here}" for name in inside(state, here)]


def _sight(room: Room, state: State, receptacle: str) -> str:
    """Return the text of what the agent sees in front of a receptacle."""
    if is_shut(state, receptacle):
        return f"The {receptacle} is closed."
    names = inside(state, receptacle) + ((LAMP_NAME,) if receptacle == room.lamp_place else ())
    if kind_of(receptacle) in OPENABLE:
        return f"The {receptacle} is open. In it, you see {listed(names)}."
    return f"{in_on(receptacle).capitalize()} the {receptacle}, you see {listed(names)}."


def _go(room: Room, state: State, receptacle: str) -> Change[State] | None:
    if receptacle not in room.receptacles or receptacle == state.location:
        return None
    moved = replace(state, location=receptacle)
    return Change(state=moved, text=f"You arrive at {receptacle}. {_sight(room, moved, receptacle)}")


def _open(room: Room, state: State, receptacle: str) -> Change[State] | None:
    if receptacle != state.location or not is_shut(state, receptacle):
        return None
    opened = replace(state, opened=state.opened | {receptacle})
    return Change(state=opened, text=f"You open the {receptacle}. {_sight(room, opened, receptacle)}")


def _close(room: Room, state: State, receptacle: str) -> Change[State] | None:
    if receptacle != state.location or receptacle not in state.opened:
        return None
    return Change(state=replace(state, opened=state.opened - {receptacle}), text=f"You close the {receptacle}.")


def _take(room: Room, state: State, name: str, receptacle: str) -> Change[State] | None:
    if receptacle != state.location or is_shut(state, receptacle) or state.held:
        return None
    if name not in inside(state, receptacle):
        return None
    taken = replace(state, places=state.places | {name: HAND})
    return Change(state=taken, text=f"You pick up the {name} from the {receptacle}.")


def _move(room: Room, state: State, name: str, receptacle: str) -> Change[State] | None:
    if receptacle != state.location or is_shut(state, receptacle) or name != state.held:
        return None
    moved = replace(state, places=state.places | {name: receptacle})
    return Change(state=moved, text=f"You move the {name} to the {receptacle}.")


def _is_treatable(name: str, verb: str, receptacle: str) -> bool:
    return kind_of(receptacle) == TREATMENTS[verb].place and kind_of(name) in TREATMENTS[verb].takes


def _treat(room: Room, state: State, verb: str, name: str, receptacle: str) -> Change[State] | None:
    if receptacle != state.location or name != state.held or not _is_treatable(name, verb, receptacle):
        return None
    changed = {
        "clean": replace(state, clean=state.clean | {name}),
        "heat": replace(state, hot=state.hot | {name}, cool=state.cool - {name}),
        "cool": replace(state, cool=state.cool | {name}, hot=state.hot - {name}),
    }[verb]
    return Change(state=changed, text=f"You {verb} the {name} using the {receptacle}.")


def _use_lamp(room: Room, state: State) -> Change[State] | None:
    if not room.lamp_place or state.location != room.lamp_place or state.lamp_on:
        return None
    return Change(state=replace(state, lamp_on=True), text=f"You turn on the {LAMP_NAME}.")


def _examine(room: Room, state: State, name: str) -> Change[State] | None:
    if name == state.location:
        return Change(state=state, text=_sight(room, state, name))
    if name != state.held:
        return None
    facts = [result for result in ("clean", "hot", "cool") if name in treated(state, result)]
    text = f"This is a {' and '.join(facts)} {name}." if facts else f"There's nothing special about {name}."
    return Change(state=state, text=text)


def _inventory(room: Room, state: State) -> Change[State]:
    text = f"You are carrying: a {state.held}." if state.held else "You are not carrying anything."
    return Change(state=state, text=text)


def _look(room: Room, state: State) -> Change[State]:
    if state.location:
        return Change(state=state, text=f"You are facing the {state.location}. {_sight(room, state, state.location)}")
    seen = listed(room.receptacles)
    return Change(state=state, text=f"You are in the middle of a room. Looking quickly around you, you see {seen}.")


_THING = r"([a-z]+ \d+)"
_RULES: tuple[tuple[re.Pattern[str], Callable[..., Change[State] | None]], ...] = (
    (re.compile(rf"go to {_THING}"), _go),
    (re.compile(rf"open {_THING}"), _open),
    (re.compile(rf"close {_THING}"), _close),
    (re.compile(rf"take {_THING} from {_THING}"), _take),
    (re.compile(rf"move {_THING} to {_THING}"), _move),
    (re.compile(rf"(clean|heat|cool) {_THING} with {_THING}"), _treat),
    (re.compile(rf"use {LAMP_NAME}"), _use_lamp),
    (re.compile(rf"examine {_THING}"), _examine),
    (re.compile("inventory"), _inventory),
    (re.compile("look"), _look),
)
