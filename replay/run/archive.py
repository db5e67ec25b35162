"""The archive: what each optimizer step was trained on, so that it can be trained again without any actor.

    trajectories/step_000012.epoch_3.bin     a header, a frame for each group in training order, a hash of the frames

A file exists whole or not at all, even when its writer is killed. After `sync` it also survives a power failure. The
learner calls `sync` before it writes the checkpoint that covers the step, so every step that a checkpoint covers can be
trained again. A learner that resumes from step s removes the later steps. The epoch in the name is the writer's: a
learner that is fenced out in the middle of a claim does not overwrite a file of its successor.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from slipstream.common.process.output import sync_path, whole_file
from slipstream.common.process.wire import SCHEMA, WireError, decode, encode
from slipstream.common.records.frame_file import read_frames, write_frames
from slipstream.common.records.trajectory import InvalidTrajectory, Outcome, check
from slipstream.common.records.version_lag import Resumption
from slipstream.replay.records.keys import FencedOut
from slipstream.replay.records.ticket import Group, Ticket

_NAME = re.compile(r"step_(\d{6}|[1-9]\d{6,})\.epoch_(0|[1-9]\d*)\.bin")


class ArchiveError(RuntimeError):
    """The archive cannot be written or read; the message names the file and what to do."""


class ArchivedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one optimizer step consumed, except the weights that it began with."""

    step: int  # from 1
    policy_version: int  # of the weights that it began with
    resumptions: tuple[Resumption, ...] = ()  # those before that version, in order
    conditions: dict[str, str]  # by name: everything else that changes the result of the arithmetic
    groups: list[Group]  # in the order in which they were trained


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    run_id: str
    step: int
    policy_version: int
    resumptions: tuple[Resumption, ...] = ()
    conditions: dict[str, str]
    num_groups: int


class _Ticketed(msgspec.Struct, frozen=True):
    """The ticket of a group, without its trajectories."""

    ticket: Ticket


class ArchiveWriter:
    """Appends the steps of one learner to the archive of its run.

    `check` raises FencedOut if another learner has taken over: it removes files of this one, which then fails to write.
    Its epoch may be the lower one, where the server has lost its newest writes, and a reader takes the highest.
    """

    def __init__(self, folder: Path, run_id: str, *, epoch: int, check: Callable[[], None] = lambda: None) -> None:
        self._folder = folder
        self._check = check
        self._run_id = run_id
        self._epoch = epoch
        self._unsynced: list[Path] = []

    def append(self, archived: ArchivedStep) -> None:
        """Write one step. It survives a killed process from here on. Raises ArchiveError, FencedOut."""
        path = self._folder / _name(archived.step, self._epoch)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                write_frames(file, _with_hash(self._frames(archived)))
        except OSError as error:
            self._check()
            raise _unwritten(path, error) from error
        try:
            self._check()  # a successor that has taken over before the write cannot have removed the file
        except FencedOut:
            path.unlink(missing_ok=True)
            raise
        self._unsynced.append(path)

    def sync(self) -> None:
        """Flush every appended step to disk, so that it survives a power failure. Raises ArchiveError, FencedOut."""
        if not self._unsynced:
            return
        for path in [*self._unsynced, self._folder, self._folder.parent]:
            try:
                sync_path(path)
            except OSError as error:
                self._check()
                raise _unwritten(path, error) from error
        self._unsynced.clear()

    def cut_after(self, step: int) -> None:
        """Remove the steps after `step`, newest first so that a crash leaves no gap, and a killed writer's files."""
        for later, epoch in sorted(_files(self._folder), reverse=True):
            if later > step:
                (self._folder / _name(later, epoch)).unlink()
        for unnamed in self._folder.glob("*.tmp"):
            unnamed.unlink()

    def _frames(self, archived: ArchivedStep) -> Iterator[bytes]:
        header = _Header(
            schema=SCHEMA,
            run_id=self._run_id,
            step=archived.step,
            policy_version=archived.policy_version,
            resumptions=archived.resumptions,
            conditions=archived.conditions,
            num_groups=len(archived.groups),
        )
        yield encode(header, compress=True)
        for group in archived.groups:
            # One frame for the whole group: its members have much in common, and separate frames take three times as
            # much space.
            yield encode(group, compress=True)


class Archive:
    """The archived steps of one run, as of when the object was made or last refreshed."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id
        self._epochs = dict[int, int]()  # of each step, the latest
        self._list()

    def refresh(self) -> None:
        """Find the steps that were archived since. The folder is listed again only if another learner wrote to it."""
        changed_ns, step = _changed_ns(self._folder), self.last_step
        if step and self._path(step).exists():
            epoch = self._epochs[step]
            while (self._folder / _name(step + 1, epoch)).exists():
                step += 1
                self._epochs[step], self._listed_ns = epoch, changed_ns
        if self._listed_ns != changed_ns:
            self._list()

    def _list(self) -> None:
        self._listed_ns = _changed_ns(self._folder)
        self._epochs = dict(sorted(_files(self._folder)))

    @property
    def last_step(self) -> int:
        """The last archived step; 0 if there is no step."""
        return max(self._epochs, default=0)

    @property
    def steps(self) -> list[int]:
        """The archived steps, in order."""
        return list(self._epochs)

    def group_ids(self, step: int, *, max_group_bytes: int) -> list[int]:
        """The ids of one step's groups, in training order. Raises ArchiveError if the file is missing or damaged."""
        path = self._path(step)
        with _explained(path, step):
            frames = _checked_frames(path, max_bytes=max_group_bytes)
            self._header(frames, step)
            return [decode(_Ticketed, frame, max_bytes=max_group_bytes).ticket.group_id for frame in frames]

    def read(self, step: int, *, vocab_size: int, max_group_bytes: int) -> ArchivedStep:
        """One step as it was trained.

        Raises ArchiveError if the file is missing, damaged or of another run, or if a group does not match its ticket.
        """
        path = self._path(step)
        with _explained(path, step):
            frames = _checked_frames(path, max_bytes=max_group_bytes)
            header = self._header(frames, step)
            groups = [decode(Group, frame, max_bytes=max_group_bytes) for frame in frames]
            if len(groups) != header.num_groups or not groups:
                raise WireError(f"it holds {len(groups)} groups, and its header declares {header.num_groups}")
            for group in groups:
                self._check(group, vocab_size)
        return ArchivedStep(
            step=step,
            policy_version=header.policy_version,
            resumptions=header.resumptions,
            conditions=header.conditions,
            groups=groups,
        )

    def conditions(self, step: int) -> dict[str, str]:
        """The conditions of one step, from its header alone. Raises ArchiveError if the header cannot be read."""
        path = self._path(step)
        with _explained(path, step):
            return self._header(read_frames(path), step).conditions

    def _header(self, frames: Iterator[bytes], step: int) -> _Header:
        header = decode(_Header, next(frames, b""))
        found, wanted = (header.schema, header.run_id, header.step), (SCHEMA, self._run_id, step)
        if found != wanted:
            raise WireError(f"its (schema, run, step) are {found}, expected {wanted}")
        return header

    def _check(self, group: Group, vocab_size: int) -> None:
        ticket, members = group.ticket, [trajectory.member for trajectory in group.trajectories]
        if not members or members != list(range(ticket.num_members)):
            raise InvalidTrajectory(
                f"group {ticket.group_id} has members {members}, expected 0 to {ticket.num_members - 1}"
            )
        for trajectory in group.trajectories:
            check(trajectory, vocab_size=vocab_size)
            ticket.check_owns(trajectory, run_id=self._run_id, outcome=Outcome.POLICY)

    def _path(self, step: int) -> Path:
        if step not in self._epochs:
            raise ArchiveError(f"{self._folder} has no step {step}; {_way_out(step)}")
        return self._folder / _name(step, self._epochs[step])


@contextlib.contextmanager
def _explained(path: Path, step: int) -> Iterator[None]:
    try:
        yield
    except (OSError, WireError, InvalidTrajectory) as error:
        raise ArchiveError(f"{path} cannot be trained on: {error}; {_way_out(step)}") from error


def _with_hash(frames: Iterable[bytes]) -> Iterator[bytes]:
    digest = xxhash.xxh3_128()
    for frame in frames:
        digest.update(frame)
        yield frame
    yield digest.digest()


def _checked_frames(path: Path, *, max_bytes: int) -> Iterator[bytes]:
    """The frames without their hash. Raises WireError after the last one if they do not match it."""
    digest, last = xxhash.xxh3_128(), None
    for frame in read_frames(path, max_bytes=max_bytes):
        if last is not None:
            digest.update(last)
            yield last
        last = frame
    if last != digest.digest():
        raise WireError("its frames do not match their hash")


def _way_out(step: int) -> str:
    if step == 1:
        return "no step can be trained again without it"
    return f"set learner.steps={step - 1} to train only the steps before it again"


def _name(step: int, epoch: int) -> str:
    return f"step_{step:06d}.epoch_{epoch}.bin"


def _files(folder: Path) -> Iterator[tuple[int, int]]:
    """(step, epoch) of every file. A path for each would take ten times as long."""
    for name in os.listdir(folder) if folder.is_dir() else ():  # noqa: PTH208
        if found := _NAME.fullmatch(name):
            yield int(found[1]), int(found[2])


def _changed_ns(folder: Path) -> int:
    """When a name in `folder` last changed; 0 if there is no folder."""
    return folder.stat().st_mtime_ns if folder.is_dir() else 0


def _unwritten(path: Path, error: OSError) -> ArchiveError:
    return ArchiveError(
        f"cannot write {path} to the archive: {error}; free some space or repair the disk, or turn the archive off by "
        "`replay.archive=false`; the run continues from its newest checkpoint"
    )
