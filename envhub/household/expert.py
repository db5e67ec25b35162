"""A planner for household tasks. It knows what is in closed receptacles, and can continue from any state."""

from slipstream.envhub.household.house import LAMP_NAME, State, delivered, is_ready, is_shut
from slipstream.envhub.household.household_task import APPLIANCES, LOOK_AT_OBJ_IN_LIGHT, TREATMENT_OF, Room, kind_of


def next_action(room: Room, state: State) -> str:
    """Return the next action of a short plan to the goal."""
    goal = room.goal
    if not state.held:
        return _fetch(room, state)
    if kind_of(state.held) != goal.object_kind:
        return _put_aside(room, state)
    if goal.task_type == LOOK_AT_OBJ_IN_LIGHT:
        return _at(state, room.lamp_place) or f"use {LAMP_NAME}"
    if goal.treatment is not None and not is_ready(room, state, state.held):
        place = next(name for name in room.receptacles if kind_of(name) == goal.treatment.place)
        return _at(state, place) or f"{TREATMENT_OF[goal.task_type]} {state.held} with {place}"
    target = _target(room, state)
    return _at_open(state, target) or f"move {state.held} to {target}"


def _fetch(room: Room, state: State) -> str:
    """Return the next action to take an undelivered object of the goal's kind; one at the current location first."""
    done = [] if room.goal.task_type == LOOK_AT_OBJ_IN_LIGHT else delivered(room, state, _target(room, state))
    wanted = [name for name in state.places if kind_of(name) == room.goal.object_kind and name not in done]
    wanted.sort(key=lambda name: state.places[name] != state.location)
    place = state.places[wanted[0]]
    return _at_open(state, place) or f"take {wanted[0]} from {place}"


def _put_aside(room: Room, state: State) -> str:
    """Return the next action to put down the held object: here, or else at the first open receptacle."""
    if state.location and not is_shut(state, state.location):
        return f"move {state.held} to {state.location}"
    place = next(name for name in room.receptacles if not is_shut(state, name) and kind_of(name) not in APPLIANCES)
    return _at_open(state, place) or f"move {state.held} to {place}"


def _target(room: Room, state: State) -> str:
    """Return the receptacle to fill: the one with the most delivered objects, then an open one, then the first."""
    places = [name for name in room.receptacles if kind_of(name) == room.goal.place_kind]
    return min(places, key=lambda place: (-len(delivered(room, state, place)), is_shut(state, place)))


def _at(state: State, place: str) -> str:
    """Return the action that goes to `place`; "" if the agent is there."""
    return "" if state.location == place else f"go to {place}"


def _at_open(state: State, place: str) -> str:
    """Return the next action to go to `place` and open it; "" if nothing is left to do."""
    return _at(state, place) or (f"open {place}" if is_shut(state, place) else "")
