"""An environment whose episode is a value: a world that never changes, and a state that each action replaces.

Most built-in environments are of this kind. Each defines only its world: the text of a task, the effect of an action,
and the actions of an expert. Snapshots and state keys are here, common to all.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from slipstream.common.process.wire import MALFORMED, WireError, decode, encode
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import Observation
from slipstream.envhub.env_options import check_choice
from slipstream.envhub.episode_env import Begun, EpisodeEnv, answered

MAX_SNAPSHOT_BYTES = 32 << 20

# Writes sets and dicts in sorted order, so that equal states are equal bytes.
_CANONICAL = msgspec.msgpack.Encoder(order="deterministic")

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change(Generic[S]):
    """The result of an action: the new state, and the text that the policy sees."""

    state: S
    text: str
    role: str = "user"  # of the message with this text
    valid: bool = True  # False: the action was refused
    over: bool = False  # the episode has ended
    score: float = 0.0  # in [0, 1]; 0 until the end


class InvalidAction(Exception):
    """A world refuses the action, which changes nothing; the policy sees the message."""

    def __init__(self, why: str, *, role: str = "user") -> None:
        super().__init__(why)
        self.role = role


def rules_in(profile: str, rules: str) -> str:
    """Return `rules` for the profile "full", and none for "small". Raises ValueError for another profile."""
    check_choice("profile", profile, ("small", "full"))
    return rules if profile == "full" else ""


class World(Protocol[S]):
    """Everything about one task that does not change. It is the same on every machine and in every episode."""

    @property
    def opening(self) -> str | tuple[Message, ...]:
        """The task in words, or all messages of the opening. They do not contain the answer."""

    @property
    def first(self) -> S:
        """The state at the start. All states have its type, and none contains a step counter."""

    async def act(self, state: S, action: str) -> Change[S]:
        """Do `action` in `state`, before the end. Raises InvalidAction, or EnvError if the environment itself fails."""

    def expert(self, state: S) -> str:
        """Return a good action in `state`, before the end."""


@runtime_checkable
class ListsActions(Protocol):
    """What a world has too if its valid actions can be listed."""

    def admissible(self, state: Any) -> list[str]:
        """Return the valid actions in `state`, before the end."""


async def tried(world: World[S], state: S, action: str) -> Change[S]:
    """Do `action` in `state`, before the end, or say why not. Raises EnvError."""
    try:
        return await world.act(state, action)
    except InvalidAction as error:
        return Change(state=state, text=str(error), role=error.role, valid=False)


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str
    task: Task
    state: msgspec.Raw
    observation: Observation


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A snapshot with its digest, so that a snapshot with even one changed bit is refused."""

    digest: bytes
    snapshot: bytes


@dataclass(kw_only=True, slots=True)
class _Episode(Begun, Generic[S]):
    world: World[S]
    state: S
    observation: Observation


class WorldEnv(EpisodeEnv[_Episode[S]]):
    """An `Env` that plays worlds. The only component of the reward, `reward`, is the score."""

    replay_only: ClassVar[bool] = False

    def __init__(
        self,
        kind: str,
        *,
        make_world: Callable[[Task], World[S]],
        rules: str = "",
        reward: str = "solved",
        columns: Callable[[Any], Mapping[str, Any]] | None = None,
        tools: tuple[Mapping[str, Any], ...] = (),
        num_tasks: Mapping[str, int] | None = None,
    ) -> None:
        """Make one that plays the worlds of `make_world`, and names the `columns` of a world's task.

        `kind` names the environment and its options. A snapshot can only be restored in an environment of its kind.
        `rules` are the system message; "" for none. `tools` are the actions as functions, as in `Observation.tools`.
        `num_tasks` has the number of tasks by split, where they are the rows of a file.
        """
        self._kind = kind
        self._make_world = make_world
        self._system = (Message("system", rules),) if rules else ()
        self._reward = reward
        self._columns = columns
        self._tools = tools
        self.num_tasks = num_tasks or {}

    async def reset(self, task: Task) -> Observation:
        world = self._make_world(task)
        columns = self._columns(world) if self._columns else {}
        opening = world.opening
        asked = (Message("user", opening),) if isinstance(opening, str) else opening
        observation = Observation(messages=(*self._system, *asked), rewards={}, columns=columns, tools=self._tools)
        self._episode = _Episode(task=task, world=world, state=world.first, observation=observation)
        return observation

    async def _act(self, episode: _Episode[S], action: str) -> Observation:
        change = await tried(episode.world, episode.state, action)
        episode.state = change.state
        rewards = {self._reward: change.score}
        episode.observation = answered(
            change.text, rewards, role=change.role, valid=change.valid, terminated=change.over, score=change.score
        )
        return episode.observation

    def snapshot(self) -> bytes:
        """Return the episode as one wire frame. Raises EnvError before a reset."""
        episode = self._started()
        snapshot = encode(
            _Snapshot(
                kind=self._kind,
                task=episode.task,
                state=msgspec.Raw(_CANONICAL.encode(episode.state)),
                observation=episode.observation,
            )
        )
        return encode(_Sealed(digest=_digest(snapshot), snapshot=snapshot))

    def restore(self, state: bytes) -> Observation:
        sealed = decode(_Sealed, state, max_bytes=MAX_SNAPSHOT_BYTES)
        if sealed.digest != _digest(sealed.snapshot):
            raise WireError("the frame of the snapshot is corrupt: its digest does not match")
        snapshot = decode(_Snapshot, sealed.snapshot, max_bytes=MAX_SNAPSHOT_BYTES)
        if snapshot.kind != self._kind:
            raise ValueError(
                f"the snapshot is of {snapshot.kind}, but this environment is {self._kind}; use the same options"
            )
        world = self._make_world(snapshot.task)
        try:
            restored = msgspec.msgpack.decode(snapshot.state, type=type(world.first))
        except MALFORMED as error:
            raise WireError(f"the snapshot's state is not a state of {self._kind}: {error}") from error
        shown = snapshot.observation
        self._episode = _Episode(task=snapshot.task, world=world, state=restored, observation=shown, is_over=shown.done)
        return shown

    def admissible(self) -> list[str] | None:
        episode = self._started()
        if episode.is_over:
            return []
        return episode.world.admissible(episode.state) if isinstance(episode.world, ListsActions) else None

    def state_key(self) -> str:
        episode = self._started()
        return f"{episode.task.task_id} {_digest(_CANONICAL.encode(episode.state)).hex()}"

    def expert(self) -> str:
        episode = self._running()
        return episode.world.expert(episode.state)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
