"""Reads a run's trajectories: from Redis while they are there, else from the archive of what steps were trained on."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import redis

from slipstream.common.config.config import Config
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import RedisUnreachable
from slipstream.common.process.printable import printable
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.wire import MAX_FRAME_BYTES, WireError
from slipstream.common.records.trajectory import InvalidTrajectory, Trajectory, decode_trajectory
from slipstream.common.text.transcript import Transcriber
from slipstream.replay.buffer.listing import ListedGroup, NotRecorded, find_group, list_groups, payloads
from slipstream.replay.fleet.fleet import Fleet, UnknownRun
from slipstream.replay.records.ledger import STATES
from slipstream.replay.records.ticket import Ticket
from slipstream.replay.run.archive import Archive, ArchivedStep, ArchiveError
from slipstream.tools.run.prepare import load_tokenizer, model_folder
from slipstream.tools.see.run_client import client_of
from slipstream.tools.see.run_files import ANY_TOKEN, MAX_GROUP_BYTES

ARCHIVED = "archived"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGroup:
    """A group, with its trajectories that are stored."""

    ticket: Ticket
    state: str  # ARCHIVED where it was read from the archive
    step: int | None  # the last step that it was claimed for
    trajectories: dict[int, Trajectory]  # by member
    unreadable: dict[int, str] = field(default_factory=dict)  # by member: why its payload could not be read


class RunRecords:
    """Reads one stream of one run. If no server answers, it reads only the archive."""

    def __init__(self, config: Config, *, stream: str) -> None:
        self._config = config
        self._stream = stream
        self._run_dir = RunDir(config.run.root, config.run.name)
        self._archive = Archive(self._run_dir.trajectories, config.run.name)
        self._client: redis.Redis | None = None
        try:
            self._client = client_of(config)
        except (ConfigError, RedisUnreachable, UnknownRun):
            if not self._archived_steps():
                raise

    @cached_property
    def transcriber(self) -> Transcriber:
        """Turns the run's tokens into text. Raises ConfigError if the run's model is not on this host."""
        return transcriber_of(self._model_folder(), self._config.model)

    def group(self, group_id: int) -> RecordedGroup:
        """One group. Raises NotRecorded."""
        if self._client:
            found = find_group(self._client, self._config.run.name, group_id, stream=self._stream)
            held = self._read(self._client, found) if found else None
            if held:
                return held
        step = self._last_step_with(group_id)
        if step is not None:
            return next(group for group in self._groups_of(step) if group.ticket.group_id == group_id)
        raise NotRecorded(
            f"group {group_id} is not in the {self._stream} stream of {self._config.run.name}: {self._looked()}; "
            "`slipstream replay groups` lists the groups in Redis"
        )

    def held(self, states: Collection[str]) -> Iterator[RecordedGroup]:
        """Yield the groups in Redis that are in `states` and have a trajectory."""
        if not self._client:
            raise NotRecorded(
                f"no server answers for {self._config.run.name}; export from its archive with --steps A:B"
            )
        for group in list_groups(self._client, self._config.run.name, states=states, stream=self._stream):
            if group.members and (held := self._read(self._client, group)):
                yield held

    def everything(self) -> Iterator[RecordedGroup]:
        """Yield every group once: those in the archive by their first step, then the others in Redis."""
        seen = set[int]()
        for step in self._archived_steps():
            for group in self._groups_of(step):
                if group.ticket.group_id not in seen:
                    seen.add(group.ticket.group_id)
                    yield group
        if self._client or not seen:
            yield from (group for group in self.held(STATES) if group.ticket.group_id not in seen)

    def archived(self, first: int, last: int) -> Iterator[RecordedGroup]:
        """Yield the groups of the archived steps from `first` to `last`. Raises NotRecorded if there are none."""
        steps = [step for step in self._archived_steps() if first <= step <= last]
        if not steps:
            raise NotRecorded(f"no step from {first} to {last} is archived: {self._looked()}")
        for step in steps:
            yield from self._groups_of(step)

    def _read(self, client: redis.Redis, listed: ListedGroup) -> RecordedGroup | None:
        """The group with its readable trajectories; None if it has left Redis meanwhile."""
        run_id, trajectories, unreadable = self._config.run.name, {}, {}
        frames = payloads(client, run_id, listed, stream=self._stream)
        if None in frames.values() and not find_group(client, run_id, listed.group_id, stream=self._stream):
            return None
        for member, frame in frames.items():
            if frame is None:
                unreadable[member] = "its payload is missing"
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

    def _groups_of(self, step: int) -> Iterator[RecordedGroup]:
        for group in read_archived(self._archive, step).groups:
            trajectories = dict(enumerate(group.trajectories))
            yield RecordedGroup(ticket=group.ticket, state=ARCHIVED, step=step, trajectories=trajectories)

    def _archived_steps(self) -> list[int]:
        return self._archive.steps if self._stream == "train" else []

    def _last_step_with(self, group_id: int) -> int | None:
        with _explained():
            for step in reversed(self._archived_steps()):
                if group_id in self._archive.group_ids(step, max_group_bytes=MAX_GROUP_BYTES):
                    return step
        return None

    def _looked(self) -> str:
        """The places that were searched, for an error."""
        steps = self._archived_steps()
        server = "it is not in Redis" if self._client else "no server answers"
        there = f"has steps {steps[0]} to {steps[-1]}" if steps else "is empty"
        return f"{server}, and the archive {self._run_dir.trajectories} {there}"

    def _model_folder(self) -> Path:
        folder = model_folder(self._config, self._run_dir)
        if self._client and not (folder / "tokenizer_config.json").is_file():
            folder = Path(Fleet(self._client, self._config.run.name).run_facts().model_path)
        return folder


def transcriber_of(folder: Path, model: ModelConfig) -> Transcriber:
    """Turns the tokens of the run whose model is in `folder` into text. Raises ConfigError if it is not there."""
    if not (folder / "tokenizer_config.json").is_file():
        raise ConfigError(f"the run's model folder {folder} is not on this host; give a copy as model.path=FOLDER")
    return Transcriber(load_tokenizer(folder, model), model=model)


def read_archived(archive: Archive, step: int) -> ArchivedStep:
    """One step of the archive. Raises NotRecorded."""
    with _explained():
        return archive.read(step, vocab_size=ANY_TOKEN, max_group_bytes=MAX_GROUP_BYTES)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn an ArchiveError into NotRecorded, which is printed without a traceback."""
    try:
        yield
    except ArchiveError as error:
        raise NotRecorded(printable(str(error))) from error
