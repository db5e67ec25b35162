"""An environment whose episode is a value: a world that never changes, and a state that every action replaces.

Most of the built-in environments are of this kind. What is left to each is its world: how a task reads, what an action
does, and what an expert would do. Snapshots, keys of states and the order of calls are then the same for all.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec

from common.message import Message
from common.trajectory import Task
from common.wire import WireError, decode, encode
from envhub.env import EnvError, Observation

MAX_SNAPSHOT_BYTES = 32 << 20

# Sets and dicts are written in one order, so that equal states are equal bytes.
_CANONICAL = msgspec.msgpack.Encoder(order="deterministic")

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change(Generic[S]):
    """What an action led to, and what is said about it."""

    state: S
    text: str
    valid: bool = True  # False: the action made no sense, and `state` is what it was
    over: bool = False
    score: float = 0.0  # in [0, 1]; 0 until the end


class World(Protocol[S]):
    """One task, whole: the same for the same task, on every machine and in every episode."""

    @property
    def opening(self) -> tuple[Message, ...]:
        """The system and user messages, without the answer."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that would give the answer away, so that none of them may stand in the opening. Empty: all is open."""

    @property
    def first(self) -> S:
        """The state at the start. No state holds a step counter."""

    async def act(self, state: S, action: str) -> Change[S]:
        """Do `action` in `state`, which is not over. Raises EnvError where the environment itself fails."""

    def admissible(self, state: S) -> list[str] | None:
        """The actions that make sense in `state`, which is not over; None where they cannot be listed."""

    def expert(self, state: S) -> str:
        """A good action in `state`, which is not over."""


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str
    task: Task
    state: msgspec.Raw
    observation: Observation


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A snapshot with its digest: what differs in one bit is no state that anybody was in."""

    digest: bytes
    snapshot: bytes


@dataclass(kw_only=True, slots=True)
class _Episode(Generic[S]):
    task: Task
    world: World[S]
    state: S
    observation: Observation


class WorldEnv(Generic[S]):
    """The `Env` that plays worlds. The one reward component is `solved`: the score, on the turn that ends it."""

    replay_only: ClassVar[bool] = False

    def __init__(self, kind: str, *, state: type[S], make_world: Callable[[Task], World[S]]) -> None:
        """`kind` says which environment with which options: a snapshot goes on in one of the same kind only."""
        self._kind = kind
        self._state_type = state
        self._make_world = make_world
        self._episode: _Episode[S] | None = None

    async def reset(self, task: Task) -> Observation:
        """Start `task`. Raises ValueError for a split that does not exist."""
        world = self._make_world(task)
        observation = Observation(messages=world.opening, rewards={})
        self._episode = _Episode(task=task, world=world, state=world.first, observation=observation)
        return observation

    async def step(self, action: str) -> Observation:
        """Do `action`. Raises EnvError before a reset, after the end, and where the world fails."""
        episode = self._running()
        change = await episode.world.act(episode.state, action)
        episode.state = change.state
        episode.observation = Observation(
            messages=(Message("user", change.text),),
            rewards={"solved": change.score},
            terminated=change.over,
            valid_action=change.valid,
            score=change.score,
            success=change.score == 1.0,
        )
        return episode.observation

    async def close(self) -> None:
        self._episode = None

    def snapshot(self) -> bytes:
        """The episode, as one wire frame. Raises EnvError before a reset."""
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
        """Go back to a snapshot of an environment of this kind. Raises ValueError for bytes that are none."""
        sealed = decode(_Sealed, state, max_bytes=MAX_SNAPSHOT_BYTES)
        if sealed.digest != _digest(sealed.snapshot):
            raise WireError("not the frame of a snapshot as it was taken: its digest differs")
        snapshot = decode(_Snapshot, sealed.snapshot, max_bytes=MAX_SNAPSHOT_BYTES)
        if snapshot.kind != self._kind:
            raise ValueError(f"a snapshot of {snapshot.kind} cannot go on in a world of {self._kind}")
        try:
            restored = msgspec.msgpack.decode(snapshot.state, type=self._state_type)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise WireError(f"not a state of {self._kind}: {error}") from error
        self._episode = _Episode(
            task=snapshot.task,
            world=self._make_world(snapshot.task),
            state=restored,
            observation=snapshot.observation,
        )
        return snapshot.observation

    def admissible(self) -> list[str] | None:
        """What makes sense now, none after the end; None where it cannot be listed. Raises EnvError before a reset."""
        episode = self._started()
        return [] if episode.observation.done else episode.world.admissible(episode.state)

    def state_key(self) -> str:
        """Equal for equal states of a task."""
        episode = self._started()
        return f"{episode.task.task_id} {_digest(_CANONICAL.encode(episode.state)).hex()}"

    def expert(self) -> str:
        """A good next action. Raises EnvError before a reset and after the end."""
        episode = self._running()
        return episode.world.expert(episode.state)

    def secrets(self) -> tuple[str, ...]:
        """What would give the task's answer away. Raises EnvError before a reset."""
        return self._started().world.secrets

    def _started(self) -> _Episode[S]:
        if self._episode is None:
            raise EnvError(f"{self._kind} has no episode; call reset first")
        return self._episode

    def _running(self) -> _Episode[S]:
        episode = self._started()
        if episode.observation.done:
            raise EnvError(f"the episode of {episode.task.task_id} is over; call reset first")
        return episode


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
