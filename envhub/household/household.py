"""`household`: find things in a room, treat them, and put them where they belong, in ALFWorld's words.

A simulator of our own with ALFWorld's six kinds of task, verbs and sentences; nothing is downloaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from common.message import Message
from common.trajectory import Task
from common.wire import decode, encode
from envhub.env import EnvError, Observation
from envhub.household.expert import next_action
from envhub.household.task import SIZES, TASK_TYPES, Room, make_room, opening_text
from envhub.household.world import HAND, VERBS, State, act, admissible, first_state, is_openable, is_won

MAX_SNAPSHOT_BYTES = 1 << 16
NOTHING_HAPPENS = "Nothing happens."

FULL_RULES = (
    "You are in a room and have a task to do. You can hold one thing. Closed receptacles must be opened to see or "
    "reach what is in them. Actions, where X is a receptacle and O an object, each with its number: "
    f"{', '.join(VERBS)}."
)


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    profile: str
    task_types: tuple[str, ...]
    task: Task
    state: State
    observation: Observation


@dataclass(kw_only=True, slots=True)
class _Episode:
    task: Task
    room: Room
    state: State
    observation: Observation


class HouseholdEnv:
    """Pick, place, clean, heat, cool, and look under the lamp.

    Options: `profile`, "small" (five receptacles, four objects, no system message) or "full" (a room as ALFWorld's),
    and `task_types`, some of the six, None for all. The one reward component is `won`: 1 on the turn that reaches the
    goal.
    """

    replay_only: ClassVar[bool] = False

    def __init__(self, *, profile: str = "small", task_types: Sequence[str] | None = None) -> None:
        """Raises ValueError for a profile or task type that does not exist."""
        if profile not in SIZES:
            raise ValueError(f"`env.options.profile` must be {' or '.join(SIZES)}, got {profile!r}; small is default")
        chosen = TASK_TYPES if task_types is None else task_types
        if not chosen or not set(chosen) <= set(TASK_TYPES):
            raise ValueError(
                f"`env.options.task_types` must be some of {', '.join(TASK_TYPES)}, got {task_types!r}; "
                "leave it out for all"
            )
        self._profile = profile
        self._task_types = tuple(name for name in TASK_TYPES if name in chosen)
        self._episode: _Episode | None = None

    async def reset(self, task: Task) -> Observation:
        """Start `task`. Raises ValueError for a split that does not exist."""
        room = make_room(task, profile=self._profile, task_types=self._task_types)
        system = (Message("system", FULL_RULES),) if self._profile == "full" else ()
        observation = Observation(messages=(*system, Message("user", opening_text(room))), rewards={})
        self._episode = _Episode(task=task, room=room, state=first_state(room), observation=observation)
        return observation

    async def step(self, action: str) -> Observation:
        """Do `action`. Raises EnvError before a reset and after the end."""
        episode = self._running()
        change = act(episode.room, episode.state, action)
        if change is not None:
            episode.state = change.state
        won = is_won(episode.room, episode.state)
        episode.observation = Observation(
            messages=(Message("user", NOTHING_HAPPENS if change is None else change.text),),
            rewards={"won": float(won)},
            terminated=won,
            valid_action=change is not None,
            score=float(won),
            success=won,
        )
        return episode.observation

    async def close(self) -> None:
        self._episode = None

    def snapshot(self) -> bytes:
        """The episode, as one wire frame. Raises EnvError before a reset."""
        episode = self._started()
        return encode(
            _Snapshot(
                profile=self._profile,
                task_types=self._task_types,
                task=episode.task,
                state=episode.state,
                observation=episode.observation,
            )
        )

    def restore(self, state: bytes) -> Observation:
        """Go back to a snapshot of a household with these options. Raises ValueError for bytes that are none."""
        snapshot = decode(_Snapshot, state, max_bytes=MAX_SNAPSHOT_BYTES)
        if (snapshot.profile, snapshot.task_types) != (self._profile, self._task_types):
            raise ValueError(
                f"a snapshot of a {snapshot.profile} household with {', '.join(snapshot.task_types)} cannot go on in a "
                f"{self._profile} one with {', '.join(self._task_types)}"
            )
        room = make_room(snapshot.task, profile=self._profile, task_types=self._task_types)
        _check_state(room, snapshot.state)
        _check_observation(snapshot.observation, won=is_won(room, snapshot.state))
        self._episode = _Episode(task=snapshot.task, room=room, state=snapshot.state, observation=snapshot.observation)
        return snapshot.observation

    def admissible(self) -> list[str]:
        """Every action that does something now, or tells something. Raises EnvError before a reset."""
        episode = self._started()
        return [] if episode.observation.done else admissible(episode.room, episode.state)

    def state_key(self) -> str:
        """Equal where everything stands, lies and is the same."""
        episode = self._started()
        state = episode.state
        places = sorted(state.places.items())
        sets = [sorted(names) for names in (state.opened, state.clean, state.hot, state.cool)]
        return f"{episode.task.task_id} {state.location} {places} {sets} {state.lamp_on}"

    def expert(self) -> str:
        """The next action of a short way to the goal, hidden things seen. Raises EnvError after the end."""
        episode = self._running()
        return next_action(episode.room, episode.state)

    def _started(self) -> _Episode:
        if self._episode is None:
            raise EnvError("the household has no episode; call reset first")
        return self._episode

    def _running(self) -> _Episode:
        episode = self._started()
        if episode.observation.done:
            raise EnvError(f"the episode of {episode.task.task_id} is over; call reset first")
        return episode


def _check_state(room: Room, state: State) -> None:
    """Raise ValueError unless the room can come to this state."""
    receptacles, objects = set(room.receptacles), set(room.objects)
    if state.places.keys() != objects or not set(state.places.values()) <= receptacles | {HAND}:
        raise ValueError("household snapshot: its objects are not those of the room, or lie where nothing is")
    if list(state.places.values()).count(HAND) > 1:
        raise ValueError("household snapshot: the hand holds more than one object")
    if state.location not in receptacles | {""}:
        raise ValueError(f"household snapshot: the room has no {state.location!r} to stand at")
    if not state.opened <= {name for name in receptacles if is_openable(name)}:
        raise ValueError("household snapshot: something is open that cannot be opened")
    if not state.clean | state.hot | state.cool <= objects or state.hot & state.cool:
        raise ValueError("household snapshot: something is clean, hot or cool that cannot be")
    if state.lamp_on and not room.lamp_place:
        raise ValueError("household snapshot: a lamp is on in a room without one")


def _check_observation(observation: Observation, *, won: bool) -> None:
    """Raise ValueError unless `observation` may have been made in a state that is `won` or not."""
    said = (observation.terminated, observation.truncated, observation.score, observation.success)
    if said != (won, False, float(won), won):
        raise ValueError(f"household snapshot: the observation says score {observation.score}, the room {float(won)}")
    if observation.rewards not in ({}, {"won": float(won)}):
        raise ValueError(f"household snapshot: rewards {observation.rewards}, expected won {float(won)}")
