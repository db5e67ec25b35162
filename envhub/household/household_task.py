"""Draws a household task: the room, the place of each object at the start, and the goal."""

import random
from dataclasses import dataclass

from slipstream.common.records.trajectory import Task
from slipstream.envhub.household import rooms
from slipstream.envhub.task_seed import split_of, task_rng

PICK_AND_PLACE = "pick_and_place"
LOOK_AT_OBJ_IN_LIGHT = "look_at_obj_in_light"
PICK_CLEAN_THEN_PLACE = "pick_clean_then_place"
PICK_HEAT_THEN_PLACE = "pick_heat_then_place"
PICK_COOL_THEN_PLACE = "pick_cool_then_place"
PICK_TWO_OBJ = "pick_two_obj"


@dataclass(frozen=True, kw_only=True, slots=True)
class Treatment:
    place: str  # the kind of the appliance
    takes: frozenset[str]  # the kinds of objects that it accepts
    result: str  # the new property of the object


TREATMENTS = {
    "clean": Treatment(place="sinkbasin", takes=rooms.CLEANABLE, result="clean"),
    "heat": Treatment(place="microwave", takes=rooms.HEATABLE, result="hot"),
    "cool": Treatment(place="fridge", takes=rooms.COOLABLE, result="cool"),
}
APPLIANCES = frozenset(treatment.place for treatment in TREATMENTS.values())
TREATMENT_OF = {PICK_CLEAN_THEN_PLACE: "clean", PICK_HEAT_THEN_PLACE: "heat", PICK_COOL_THEN_PLACE: "cool"}

SENTENCES = {
    PICK_AND_PLACE: ("put a {object} {in_on} {place}.", "put some {object} {in_on} {place}."),
    LOOK_AT_OBJ_IN_LIGHT: ("look at {object} under the desklamp.", "examine the {object} with the desklamp."),
    PICK_CLEAN_THEN_PLACE: ("put a clean {object} {in_on} {place}.", "clean some {object} and put it {in_on} {place}."),
    PICK_HEAT_THEN_PLACE: ("put a hot {object} {in_on} {place}.", "heat some {object} and put it {in_on} {place}."),
    PICK_COOL_THEN_PLACE: ("put a cool {object} {in_on} {place}.", "cool some {object} and put it {in_on} {place}."),
    PICK_TWO_OBJ: ("put two {object} {in_on} {place}.", "find two {object} and put them {in_on} {place}."),
}
TASK_TYPES = tuple(SENTENCES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """The goal of a task. It names kinds of objects and receptacles, not particular ones."""

    task_type: str  # one of TASK_TYPES
    object_kind: str
    place_kind: str  # the kind of receptacle to put it in; empty if the task is to look at it under the lamp

    @property
    def treatment(self) -> Treatment | None:
        """The treatment that the object needs; None if it needs none."""
        verb = TREATMENT_OF.get(self.task_type)
        return None if verb is None else TREATMENTS[verb]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The room of one task at the start. It never changes."""

    receptacles: tuple[str, ...]  # such as "drawer 2", in the order in which they are listed
    objects: dict[str, str]  # object, such as "mug 1" -> the receptacle that it is in or on
    lamp_place: str  # the receptacle that the lamp is on; empty if there is no lamp
    goal: Goal
    sentence: str  # the goal in words


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Limits on the content of a room."""

    max_receptacles: int
    max_objects: int
    num_sentences: int  # the number of sentences in use for each type of task


SIZES = {
    "small": Size(max_receptacles=5, max_objects=4, num_sentences=1),
    "full": Size(max_receptacles=40, max_objects=24, num_sentences=2),
}


def kind_of(name: str) -> str:
    """Return the kind of an object or receptacle: of "mug 1" it is "mug"."""
    return name.rpartition(" ")[0]


def in_on(receptacle: str) -> str:
    """Return the preposition, "in" or "on", for a receptacle or a kind of receptacle."""
    return "in" if receptacle.partition(" ")[0] in rooms.INSIDE else "on"


def opening_text(room: Room) -> str:
    return (
        f"You are in the middle of a room. Looking quickly around you, you see {listed(room.receptacles)}.\n\n"
        f"Your task is to: {room.sentence}"
    )


def listed(names: tuple[str, ...]) -> str:
    """Return the names as a list in words, such as "a mug 1, a cup 2, and a pan 1"."""
    if not names:
        return "nothing"
    articles = [f"a {name}" for name in names]
    return articles[0] if len(articles) == 1 else f"{', '.join(articles[:-1])}, and {articles[-1]}"


def make_room(task: Task, *, profile: str, task_types: tuple[str, ...]) -> Room:
    rng = task_rng(task, world=f"household/{profile}/{','.join(task_types)}")
    room = _draw_room(rng, SIZES[profile], task_types)
    while split_of(opening_text(room)) != task.split:
        room = _draw_room(rng, SIZES[profile], task_types)
    return room


def _draw_room(rng: random.Random, size: Size, task_types: tuple[str, ...]) -> Room:
    task_type = rng.choice(task_types)
    treatment = TREATMENTS[TREATMENT_OF[task_type]] if task_type in TREATMENT_OF else None
    kind = rng.choice([kind for kind in rooms.ROOM_KINDS if _suits(kind, task_type, treatment)])
    objects = [name for name in kind.objects if treatment is None or name in treatment.takes]
    places = [name for name, (at_least, _) in kind.receptacles.items() if at_least and name not in APPLIANCES]
    goal = Goal(
        task_type=task_type,
        object_kind=rng.choice(objects),
        place_kind="" if task_type == LOOK_AT_OBJ_IN_LIGHT else rng.choice(places),
    )
    receptacles = _draw_receptacles(rng, kind, size, goal)
    lamp_places = [name for name in receptacles if kind_of(name) in kind.lamp_places]
    sentence = rng.choice(SENTENCES[task_type][: size.num_sentences])
    return Room(
        receptacles=receptacles,
        objects=_place_objects(rng, _draw_objects(rng, kind, size, goal), receptacles, goal),
        lamp_place=rng.choice(lamp_places) if lamp_places else "",
        goal=goal,
        sentence=sentence.format(object=goal.object_kind, place=goal.place_kind, in_on=in_on(goal.place_kind)),
    )


def _suits(kind: rooms.RoomKind, task_type: str, treatment: Treatment | None) -> bool:
    if task_type == LOOK_AT_OBJ_IN_LIGHT:
        return bool(kind.lamp_places)
    return treatment is None or (treatment.place in kind.receptacles and bool(treatment.takes & set(kind.objects)))


def _draw_receptacles(rng: random.Random, kind: rooms.RoomKind, size: Size, goal: Goal) -> tuple[str, ...]:
    """Return numbered receptacles: those that the goal needs, then others at random, up to the maximum."""
    lamp_place = rng.choice(kind.lamp_places) if kind.lamp_places else ""
    treatment_place = goal.treatment.place if goal.treatment else ""
    needed = sorted({goal.place_kind, treatment_place, lamp_place} - {""})
    # One more receptacle, because at the start the wanted object must not be where it goes.
    needed.append(rng.choice([name for name in kind.receptacles if name not in needed and in_on(name) == "on"]))
    names = list(needed)
    for name, (at_least, at_most) in kind.receptacles.items():
        names += [name] * (rng.randint(at_least, at_most) - needed.count(name))
    extra = names[len(needed) :]
    rng.shuffle(extra)
    chosen = sorted([*needed, *extra][: size.max_receptacles])
    return tuple(f"{name} {chosen[: position + 1].count(name)}" for position, name in enumerate(chosen))


def _draw_objects(rng: random.Random, kind: rooms.RoomKind, size: Size, goal: Goal) -> list[str]:
    num_wanted = rng.randint(2, 3) if goal.task_type == PICK_TWO_OBJ else rng.randint(1, 2)
    others = [name for name in kind.objects if name != goal.object_kind]
    drawn = rng.choices(others, k=size.max_objects - num_wanted) + [goal.object_kind] * num_wanted
    drawn.sort()
    return [f"{name} {drawn[: position + 1].count(name)}" for position, name in enumerate(drawn)]


def _place_objects(rng: random.Random, names: list[str], receptacles: tuple[str, ...], goal: Goal) -> dict[str, str]:
    """Return a random receptacle for each object. For wanted objects, it is not of the kind that they go to."""
    elsewhere = [name for name in receptacles if kind_of(name) != goal.place_kind]
    return {name: rng.choice(elsewhere if kind_of(name) == goal.object_kind else list(receptacles)) for name in names}
