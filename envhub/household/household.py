"""`household`: find objects in a room, treat them, and put them where they belong, in ALFWorld's words.

It is a simulator of its own, with ALFWorld's six types of tasks, verbs and sentences. Nothing is downloaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from slipstream.common.records.trajectory import Task
from slipstream.envhub.household.expert import next_action
from slipstream.envhub.household.house import VERBS, State, act, admissible, is_won
from slipstream.envhub.household.household_task import TASK_TYPES, Room, make_room, opening_text
from slipstream.envhub.world import Change, InvalidAction, WorldEnv, rules_in

FULL_RULES = (
    "You are in a room and have a task to do. You can hold one thing. Closed receptacles must be opened to see or "
    "reach what is in them. Actions, where X is a receptacle and O an object, each with its number: "
    f"{VERBS}."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HouseholdWorld:
    opening: str
    first: State
    room: Room

    async def act(self, state: State, action: str) -> Change[State]:
        change = act(self.room, state, action)
        if change is None:
            raise InvalidAction("Nothing happens.")
        won = is_won(self.room, change.state)
        return Change(state=change.state, text=change.text, over=won, score=float(won))

    def admissible(self, state: State) -> list[str]:
        return admissible(self.room, state)

    def expert(self, state: State) -> str:
        return next_action(self.room, state)


class HouseholdEnv(WorldEnv[State]):
    """The environment of household tasks: pick, place, clean, heat, cool, and look under the lamp.

    `profile`: "small" (five receptacles, four objects, no system message) or "full" (a room as in ALFWorld).
    `task_types`: some of the six types; None for all. The one reward component is `won`: 1 on the turn that reaches the
    goal.
    """

    def __init__(self, *, profile: str = "small", task_types: Sequence[str] | None = None) -> None:
        """Raises ValueError for an unknown profile or type of task."""
        given = TASK_TYPES if task_types is None else task_types
        if not given or not set(given) <= set(TASK_TYPES):
            raise ValueError(
                f"`env.options.task_types` must be some of {', '.join(TASK_TYPES)}, got {task_types!r}; "
                "leave it out for all"
            )
        chosen = tuple(name for name in TASK_TYPES if name in given)
        super().__init__(
            f"household {profile} task_types={','.join(chosen)}",
            make_world=partial(_make_household, profile=profile, task_types=chosen),
            rules=rules_in(profile, FULL_RULES),
            reward="won",
            columns=lambda world: {"type": world.room.goal.task_type},
        )


def _make_household(task: Task, *, profile: str, task_types: tuple[str, ...]) -> HouseholdWorld:
    room = make_room(task, profile=profile, task_types=task_types)
    return HouseholdWorld(opening=opening_text(room), first=State(places=room.objects), room=room)
