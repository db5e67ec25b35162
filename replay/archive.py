"""What each optimizer step was trained on, in the run's directory: enough to train it again without any actor.

    trajectories/step_000012.epoch_3.bin     a header, then a frame for each group, in the order of training

A file is there whole or not at all, however its writer is killed. After `sync` it survives a loss of power too; that
comes before the checkpoint that covers the step, so what a checkpoint holds can always be trained again. A learner that
resumes from step s cuts what lies after s. The epoch is the writer's: a learner that was fenced out while it held a
claim writes beside its successor, not over it.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.archive import read_frames, write_frames
from common.run_dir import sync_path
from common.trajectory import InvalidTrajectory, Outcome, check
from common.wire import SCHEMA, WireError, decode, encode
from replay.ticket import Group, Ticket

_NAME = re.compile(r"step_(\d{6,})\.epoch_(\d+)\.bin")


class ArchiveError(RuntimeError):
    """The archive cannot be written or read; the message names the file and what to do."""


class ArchivedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step, but for the weights that it began with."""

    step: int  # from 1
    policy_version: int  # of the weights that it began with
    conditions: dict[str, str]  # what else its arithmetic depended on, by name
    groups: list[Group]  # in the order in which they were trained


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    run_id: str
    step: int
    policy_version: int
    conditions: dict[str, str]
    num_groups: int


class _Ticketed(msgspec.Struct, frozen=True):
    """Of a group, the ticket alone."""

    ticket: Ticket


class ArchiveWriter:
    """Adds to a run's archive the steps that one learner makes."""

    def __init__(self, folder: Path, run_id: str, *, epoch: int) -> None:
        self._folder = folder
        self._run_id = run_id
        self._epoch = epoch
        self._unsynced: list[Path] = []

    def append(self, archived: ArchivedStep) -> None:
        """Write one step; a killed process does not undo it from here on. Raises ArchiveError."""
        path = self._folder / f"step_{archived.step:06d}.epoch_{self._epoch}.bin"
        unnamed = path.with_suffix(".tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with unnamed.open("wb") as file:
                write_frames(file, self._frames(archived))
            unnamed.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unnamed.unlink()
            raise _unwritten(path, error) from error
        self._unsynced.append(path)

    def sync(self) -> None:
        """Make what was appended durable: a loss of power does not undo it from here on. Raises ArchiveError."""
        if not self._unsynced:
            return
        for path in [*self._unsynced, self._folder, self._folder.parent]:
            try:
                sync_path(path)
            except OSError as error:
                raise _unwritten(path, error) from error
        self._unsynced.clear()

    def cut_after(self, step: int) -> None:
        """Remove every later step and what a killed writer left. Newest first: a crash half-way leaves no gap."""
        for later, _, path in sorted(_files(self._folder), reverse=True):
            if later > step:
                path.unlink()
        for unnamed in self._folder.glob("*.tmp"):
            unnamed.unlink()

    def _frames(self, archived: ArchivedStep) -> Iterator[bytes]:
        header = _Header(
            schema=SCHEMA,
            run_id=self._run_id,
            step=archived.step,
            policy_version=archived.policy_version,
            conditions=archived.conditions,
            num_groups=len(archived.groups),
        )
        yield encode(header, compress=True)
        for group in archived.groups:
            yield encode(
                group, compress=True
            )  # siblings have much in common: a frame each would be three times as long


class Archive:
    """The steps of one run, as they are when it is made."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id
        self._paths = {step: path for step, _, path in sorted(_files(folder))}  # of a step, by the latest epoch

    @property
    def last_step(self) -> int:
        """0 where there is none."""
        return max(self._paths, default=0)

    @property
    def steps(self) -> list[int]:
        """Those that are there, in order."""
        return list(self._paths)

    def group_ids(self, step: int, *, max_group_bytes: int) -> list[int]:
        """Those of one step, in the order in which they were trained. Raises ArchiveError as `conditions` does."""
        path = self._path(step)
        with _explained(path, step):
            frames = read_frames(path, max_bytes=max_group_bytes)
            self._header(frames, step)
            return [decode(_Ticketed, frame, max_bytes=max_group_bytes).ticket.group_id for frame in frames]

    def read(self, step: int, *, vocab_size: int, max_group_bytes: int) -> ArchivedStep:
        """One step as it was trained.

        Raises ArchiveError where it is missing, damaged, of another run, or holds what its tickets do not allow.
        """
        path = self._path(step)
        with _explained(path, step):
            frames = read_frames(path, max_bytes=max_group_bytes)
            header = self._header(frames, step)
            groups = [decode(Group, frame, max_bytes=max_group_bytes) for frame in frames]
            if len(groups) != header.num_groups or not groups:
                raise WireError(f"it holds {len(groups)} groups and says {header.num_groups}")
            for group in groups:
                self._check(group, vocab_size)
        return ArchivedStep(
            step=step, policy_version=header.policy_version, conditions=header.conditions, groups=groups
        )  # fmt: skip

    def conditions(self, step: int) -> dict[str, str]:
        """Those of one step. Raises ArchiveError as `read` does, as far as the header tells."""
        path = self._path(step)
        with _explained(path, step):
            return self._header(read_frames(path), step).conditions

    def _header(self, frames: Iterator[bytes], step: int) -> _Header:
        header = decode(_Header, next(frames, b""))
        found, wanted = (header.schema, header.run_id, header.step), (SCHEMA, self._run_id, step)
        if found != wanted:
            raise WireError(f"its (schema, run, step) are {found}, not {wanted}")
        return header

    def _check(self, group: Group, vocab_size: int) -> None:
        ticket, members = group.ticket, [trajectory.member for trajectory in group.trajectories]
        if not members or members != list(range(ticket.num_members)):
            raise InvalidTrajectory(f"group {ticket.group_id} has members {members} of {ticket.num_members}")
        for trajectory in group.trajectories:
            check(trajectory, vocab_size=vocab_size)
            ticket.check_owns(trajectory, run_id=self._run_id, outcome=Outcome.POLICY)

    def _path(self, step: int) -> Path:
        if step not in self._paths:
            raise ArchiveError(f"{self._folder} has no step {step}; {_way_out(step)}")
        return self._paths[step]


@contextlib.contextmanager
def _explained(path: Path, step: int) -> Iterator[None]:
    try:
        yield
    except (OSError, WireError, InvalidTrajectory) as error:
        raise ArchiveError(f"{path} cannot be trained on: {error}; {_way_out(step)}") from error


def _way_out(step: int) -> str:
    if step == 1:
        return "nothing can be trained again without it"
    return f"what comes before it can be trained again by learner.steps={step - 1}"


def _files(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """(step, epoch, path) of every file."""
    for path in folder.glob("step_*.bin"):
        if found := _NAME.fullmatch(path.name):
            yield int(found[1]), int(found[2]), path


def _unwritten(path: Path, error: OSError) -> ArchiveError:
    return ArchiveError(
        f"cannot archive {path}: {error}; make room or mend the disk, or do without by `replay.archive=false`; the run "
        "goes on from its newest checkpoint"
    )
