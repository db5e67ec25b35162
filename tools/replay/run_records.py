"""What a run's trajectories are read from: Redis while it holds them, the run's archive once they were claimed."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common.config import Config
from common.config_error import ConfigError
from common.connection import RedisUnreachable
from common.run_dir import RunDir
from common.trajectory import InvalidTrajectory, Trajectory, decode_trajectory
from common.transcript import Transcriber
from common.wire import MAX_FRAME_BYTES, WireError
from replay.archive import Archive, ArchiveError
from replay.fleet import Fleet, UnknownRun
from replay.ledger import STATES
from replay.listing import ListedGroup, NotRecorded, find_group, list_groups, payloads
from replay.ticket import Group, Ticket
from tools.prepare import load_tokenizer, model_folder
from tools.printable import printable
from tools.replay.run_client import Shard, shard_of, shards_of

MAX_GROUP_BYTES = 1 << 30  # in memory at one time, from an archive
ANY_TOKEN = 2**31  # a vocabulary without end: who looks at a record wants to see it as it is


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGroup:
    """A group and those of its trajectories that are there."""

    ticket: Ticket
    state: str  # "archived" where it was read from the archive
    step: int | None  # the last that it was claimed for
    trajectories: dict[int, Trajectory]  # by member
    unreadable: dict[int, str]  # by member, why there is a payload and no trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """What one optimizer step was given."""

    step: int
    policy_version: int | None  # that it began with; None where only Redis holds it
    groups: list[RecordedGroup]  # each with a trajectory at least


class RunRecords:
    """One stream of one run. Without a server that answers, the archive alone."""

    def __init__(self, config: Config, *, stream: str) -> None:
        self._config = config
        self._stream = stream
        self._run_dir = RunDir(config.run.root, config.run.name)
        self._archive = Archive(self._run_dir.trajectories, config.run.name)
        self._shards: list[Shard] = []
        try:
            self._shards = shards_of(config, stream=stream)
        except (ConfigError, RedisUnreachable, UnknownRun):
            if not self._archived_steps():
                raise

    @cached_property
    def transcriber(self) -> Transcriber:
        """Reads the run's tokens. Raises ConfigError where its model is not on this host."""
        return Transcriber(load_tokenizer(self._model_folder()))

    def group(self, group_id: int) -> RecordedGroup:
        """One group. Raises NotRecorded."""
        if self._shards:
            shard = shard_of(self._shards, group_id)
            found = find_group(shard.client, shard.name, group_id, stream=self._stream)
            held = self._read(shard, found) if found else None
            if held:
                return held
        step = self._last_step_with(group_id)
        if step is not None:
            return next(group for group in self._archived(step).groups if group.ticket.group_id == group_id)
        raise NotRecorded(
            f"group {group_id} is not in the {self._stream} stream of {self._config.run.name}: {self._looked()}; "
            "`slipstream replay groups` lists those that are held"
        )

    def step(self, step: int) -> RecordedStep:
        """What `step` was given. Raises NotRecorded."""
        if step in self._archived_steps():
            return self._archived(step)
        used = (self._read(shard, group) for shard, group in self._listed(["claimed", "ready"]) if step in group.uses)
        readable = [group for group in used if group and group.trajectories]
        if readable:
            return RecordedStep(step=step, policy_version=None, groups=readable)
        raise NotRecorded(f"nothing is recorded of step {step} of {self._config.run.name}: {self._looked()}")

    def held(self, states: Collection[str]) -> Iterator[RecordedGroup]:
        """The groups that Redis holds in `states` and that have a trajectory, one after another."""
        if not self._shards:
            raise NotRecorded(
                f"no server answers for {self._config.run.name}; export from its archive with --steps A:B"
            )
        for shard, group in self._listed(states):
            held = self._read(shard, group) if group.members else None
            if held:
                yield held

    def everything(self) -> Iterator[RecordedGroup]:
        """Every group once: what was trained on, by its first step, and then what Redis holds besides."""
        seen = set[int]()
        for step in self._archived_steps():
            for group in self._archived(step).groups:
                if group.ticket.group_id not in seen:
                    seen.add(group.ticket.group_id)
                    yield group
        if self._shards or not seen:
            yield from (group for group in self.held(STATES) if group.ticket.group_id not in seen)

    def archived(self, first: int, last: int) -> Iterator[RecordedGroup]:
        """The groups of the steps from `first` to `last`, one after another. Raises NotRecorded for no step."""
        steps = [step for step in self._archived_steps() if first <= step <= last]
        if not steps:
            raise NotRecorded(f"no step from {first} to {last} is archived: {self._looked()}")
        for step in steps:
            yield from self._archived(step).groups

    def _listed(self, states: Collection[str]) -> Iterator[tuple[Shard, ListedGroup]]:
        for shard in self._shards:
            for group in list_groups(shard.client, shard.name, states=states, stream=self._stream):
                yield shard, group

    def _read(self, shard: Shard, listed: ListedGroup) -> RecordedGroup | None:
        """The group with what can be read of it; None when it left Redis meanwhile."""
        client, trajectories, unreadable = shard.client, {}, {}
        frames = payloads(client, shard.name, listed, stream=self._stream)
        if None in frames.values() and not find_group(client, shard.name, listed.group_id, stream=self._stream):
            return None
        for member, frame in frames.items():
            if frame is None:
                unreadable[member] = "its payload is gone"
                continue
            try:
                trajectories[member] = decode_trajectory(frame, max_bytes=MAX_FRAME_BYTES, vocab_size=ANY_TOKEN)
            except (WireError, InvalidTrajectory) as error:
                unreadable[member] = f"{error} (sent by {listed.members[member].actor})"
        return RecordedGroup(
            ticket=listed.ticket,
            state=listed.state,
            step=listed.uses[-1] if listed.uses else None,
            trajectories=trajectories,
            unreadable=unreadable,
        )

    def _archived_steps(self) -> list[int]:
        return self._archive.steps if self._stream == "train" else []

    def _last_step_with(self, group_id: int) -> int | None:
        with _told_to_people():
            for step in reversed(self._archived_steps()):
                if group_id in self._archive.group_ids(step, max_group_bytes=MAX_GROUP_BYTES):
                    return step
        return None

    def _archived(self, step: int) -> RecordedStep:
        with _told_to_people():
            archived = self._archive.read(step, vocab_size=ANY_TOKEN, max_group_bytes=MAX_GROUP_BYTES)
        groups = [_archived_group(group, step) for group in archived.groups]
        return RecordedStep(step=step, policy_version=archived.policy_version, groups=groups)

    def _looked(self) -> str:
        """Where there is nothing to be found, for a person who looks on."""
        steps = self._archived_steps()
        server = "Redis does not hold it" if self._shards else "no server answers"
        there = f"holds steps {steps[0]} to {steps[-1]}" if steps else "is empty"
        return f"{server}, and the archive {self._run_dir.trajectories} {there}"

    def _model_folder(self) -> Path:
        folder = model_folder(self._config, self._run_dir)
        if self._shards and not (folder / "tokenizer_config.json").is_file():
            folder = Path(Fleet(self._shards[0].client, self._config.run.name).run_facts().model_path)
        if not (folder / "tokenizer_config.json").is_file():
            raise ConfigError(f"the run's model folder {folder} is not on this host; name a copy by model.path=FOLDER")
        return folder


@contextlib.contextmanager
def _told_to_people() -> Iterator[None]:
    try:
        yield
    except ArchiveError as error:
        raise NotRecorded(printable(str(error))) from error


def _archived_group(group: Group, step: int) -> RecordedGroup:
    return RecordedGroup(
        ticket=group.ticket,
        state="archived",
        step=step,
        trajectories=dict(enumerate(group.trajectories)),
        unreadable={},
    )
