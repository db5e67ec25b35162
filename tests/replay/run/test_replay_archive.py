"""What steps were trained on is read as it was written, cut where a learner resumes, and refused if it is not whole."""

import os
import struct
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from slipstream.common.process.wire import MAX_FRAME_BYTES, SCHEMA, encode
from slipstream.common.records.frame_file import read_frames, write_frames
from slipstream.common.records.kept_sets import kept_sets
from slipstream.common.records.version_lag import Resumption
from slipstream.replay.records.keys import FencedOut
from slipstream.replay.records.ticket import Group
from slipstream.replay.run.archive import Archive, ArchivedStep, ArchiveError, ArchiveWriter, _with_hash
from tests.full_disk import largest_file
from tests.replay.records.attempts import SAMPLING, attempt_at, lease_of, ticket

RUN = "run"
CONDITIONS = {"optim.lr": "0.001", "threads of a rank": "1"}
LIMITS = {"vocab_size": 100, "max_group_bytes": 1 << 20}


def group(group_id: int, *, num_members: int = 2, run_id: str = RUN) -> Group:
    owned = ticket(group_id, num_members=num_members)
    members = [attempt_at(lease_of(owned), member, run_id=run_id) for member in range(num_members)]
    return Group(ticket=owned, num_uses=1, trajectories=members)


def step(number: int, *groups: Group) -> ArchivedStep:
    """Trained on groups out of the order of their ids, unless they are given."""
    trained = list(groups) or [group(10 * number + 1), group(10 * number)]
    return ArchivedStep(step=number, policy_version=number + 5, conditions=CONDITIONS, groups=trained)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The archive of three steps."""
    writer = ArchiveWriter(tmp_path / "trajectories", RUN, epoch=1)
    for number in (1, 2, 3):
        writer.append(step(number))
    writer.sync()
    return tmp_path / "trajectories"


def file_of(folder: Path, number: int) -> Path:
    return folder / f"step_{number:06d}.epoch_1.bin"


def test_steps_are_read_as_they_were_trained_in_their_order(folder: Path) -> None:
    archive = Archive(folder, RUN)
    assert archive.last_step == 3
    for number in (1, 2, 3):
        assert archive.read(number, **LIMITS) == step(number)
        assert archive.conditions(number) == CONDITIONS
    assert [group.ticket.seed for group in archive.read(1, **LIMITS).groups] == [7, 7]


def cut(trained: Group) -> Group:
    """The group as if top-k had sampled it."""
    sampling = msgspec.structs.replace(SAMPLING, top_k=3)
    kept = {"sampling": sampling, "kept": kept_sets([[5, 7, 9], [5]])}
    members = [msgspec.structs.replace(trajectory, **kept) for trajectory in trained.trajectories]
    ticket = msgspec.structs.replace(trained.ticket, sampling=sampling)
    return msgspec.structs.replace(trained, ticket=ticket, trajectories=members)


RESUMED = (Resumption(checkpoint_version=5, first_version=10), Resumption(checkpoint_version=11, first_version=12))


@pytest.mark.parametrize(
    "later", [msgspec.structs.replace(step(1), resumptions=RESUMED), step(1, cut(group(1)))], ids=["resumed", "cut"]
)
def test_where_a_learner_came_back_and_kept_sets_are_archived_with_a_step(tmp_path: Path, later: ArchivedStep) -> None:
    ArchiveWriter(tmp_path, RUN, epoch=1).append(later)
    assert Archive(tmp_path, RUN).read(1, **LIMITS) == later


def test_a_missing_step_is_named_with_the_way_out_and_a_run_without_an_archive_has_none(folder: Path) -> None:
    file_of(folder, 2).unlink()
    with pytest.raises(ArchiveError, match=r"has no step 2; set learner\.steps=1 to train only the steps before it"):
        Archive(folder, RUN).conditions(2)
    none = Archive(folder / "nowhere", RUN)
    assert none.last_step == 0
    with pytest.raises(ArchiveError, match="has no step 1; no step can be trained again without it"):
        none.read(1, **LIMITS)


def test_a_learner_that_resumes_cuts_what_came_after_its_checkpoint(folder: Path) -> None:
    (folder / "step_000004.epoch_1.tmp").write_bytes(file_of(folder, 3).read_bytes()[:-7])  # killed while it wrote
    resumed = ArchiveWriter(folder, RUN, epoch=2)
    resumed.cut_after(1)
    assert [path.name for path in folder.iterdir()] == ["step_000001.epoch_1.bin"]
    resumed.append(step(2, group(77)))
    resumed.sync()
    archive = Archive(folder, RUN)
    assert archive.last_step == 2
    assert archive.read(2, **LIMITS) == step(2, group(77))


def test_a_refresh_lists_a_folder_only_if_another_learner_wrote(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, listdir = Archive(folder, RUN), Mock(side_effect=os.listdir)
    monkeypatch.setattr(os, "listdir", listdir)
    for number in (4, 5):
        ArchiveWriter(folder, RUN, epoch=1).append(step(number))
    archive.refresh()
    assert (archive.steps, listdir.call_count) == ([1, 2, 3, 4, 5], 0)
    successor = ArchiveWriter(folder, RUN, epoch=2)
    successor.cut_after(3)
    successor.append(step(4))
    archive.refresh()
    assert archive.steps == [1, 2, 3, 4] and archive.read(4, **LIMITS) == step(4)
    successor.append(step(5))
    listdir.reset_mock()
    archive.refresh()
    archive.refresh()
    assert (archive.steps, listdir.call_count) == ([1, 2, 3, 4, 5], 0)


def test_cutting_removes_the_newest_step_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a crash between two removals leaves no step without those before it."""
    removed: list[str] = []
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path: (removed.append(path.name), unlink(path)))
    ArchiveWriter(folder, RUN, epoch=2).cut_after(0)
    assert removed == [f"step_00000{number}.epoch_1.bin" for number in (3, 2, 1)]


def test_a_learner_that_was_fenced_out_does_not_overwrite_its_successor(folder: Path) -> None:
    """Nor does one whose epoch is higher: the server forgot it, and gave the run to the learner before."""
    zombie = ArchiveWriter(folder, RUN, epoch=1)
    successor = ArchiveWriter(folder, RUN, epoch=2)
    successor.cut_after(2)
    successor.append(step(3, group(50)))
    zombie.append(step(3, group(60)))
    assert Archive(folder, RUN).read(3, **LIMITS) == step(3, group(50))
    fenced = FencedOut("another learner has taken over")
    with pytest.raises(FencedOut):
        ArchiveWriter(folder, RUN, epoch=3, check=Mock(side_effect=fenced)).append(step(3, group(60)))
    assert Archive(folder, RUN).read(3, **LIMITS) == step(3, group(50))


@pytest.mark.parametrize(
    ("damaged", "complaint"),
    [
        (lambda whole: whole[:-1], "ends inside a frame"),
        (lambda whole: whole[: len(whole) // 2], "ends inside a frame"),
        (lambda whole: b"", "its frames do not match their hash"),
        (lambda whole: b"\x01", "ends inside the length of a frame"),
        (lambda whole: struct.pack("<I", MAX_FRAME_BYTES + 1) + whole, "declares a frame of"),
        (lambda whole: whole + whole, "frame has magic"),
        (lambda whole: b"PK\x03\x04" + bytes(200), "limit is"),
        (lambda whole: os.urandom(3) + b"\x00" + whole, "frame"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_by_its_name(folder: Path, damaged, complaint: str) -> None:  # type: ignore[no-untyped-def]
    path = file_of(folder, 2)
    path.write_bytes(damaged(path.read_bytes()))
    with pytest.raises(ArchiveError, match=rf"step_000002\.epoch_1\.bin cannot be trained on: .*{complaint}"):
        Archive(folder, RUN).read(2, **LIMITS)


def test_a_step_under_another_number_or_of_another_run_is_refused(folder: Path) -> None:
    with pytest.raises(ArchiveError, match=rf"\({SCHEMA}, 'run', 1\), expected \({SCHEMA}, 'other', 1\)"):
        Archive(folder, "other").read(1, **LIMITS)
    file_of(folder, 1).replace(file_of(folder, 2))
    with pytest.raises(ArchiveError, match=rf"\({SCHEMA}, 'run', 1\), expected \({SCHEMA}, 'run', 2\)"):
        Archive(folder, RUN).conditions(2)


def test_trajectories_that_their_tickets_do_not_allow_are_refused(folder: Path) -> None:
    writer, stranger = ArchiveWriter(folder, RUN, epoch=2), group(5)
    swapped = msgspec.structs.replace(stranger, trajectories=stranger.trajectories[::-1])
    for trained, complaint in [
        (group(5, run_id="other"), "the ticket's is"),
        (swapped, r"group 5 has members \[1, 0\], expected 0 to 1"),
        (msgspec.structs.replace(stranger, ticket=ticket(5, num_members=3)), r"has members \[0, 1\], expected 0 to 2"),
        (msgspec.structs.replace(stranger, trajectories=[]), r"has members \[\], expected 0 to 1"),
    ]:
        writer.append(step(1, trained))
        with pytest.raises(ArchiveError, match=complaint):
            Archive(folder, RUN).read(1, **LIMITS)
    with pytest.raises(ArchiveError, match="vocabulary is"):
        Archive(folder, RUN).read(2, vocab_size=5, max_group_bytes=1 << 20)


def test_a_bomb_costs_no_more_than_a_trajectory_may(folder: Path) -> None:
    """A megabyte of zeros in a frame of a kilobyte is refused by what the frame declares."""
    huge = msgspec.structs.replace(group(5).trajectories[0], tokens=bytes(1 << 20))
    trained = msgspec.structs.replace(group(5), trajectories=[huge, group(5).trajectories[1]])
    ArchiveWriter(folder, RUN, epoch=2).append(step(1, trained))
    assert (folder / "step_000001.epoch_2.bin").stat().st_size < 2000
    with pytest.raises(ArchiveError, match=r"frame declares .* bytes, the limit is 2000"):
        Archive(folder, RUN).read(1, vocab_size=100, max_group_bytes=2000)


def test_a_step_that_lost_a_group_or_has_a_header_of_another_kind_is_refused(folder: Path) -> None:
    short = list(read_frames(file_of(folder, 1)))[:-2]
    other = [encode(ticket(1))]
    for frames, complaint in ((short, "it holds 1 groups, and its header declares 2"), (other, "not a _Header")):
        with file_of(folder, 1).open("wb") as file:
            write_frames(file, _with_hash(frames))
        with pytest.raises(ArchiveError, match=complaint):
            Archive(folder, RUN).read(1, **LIMITS)


def test_a_full_disk_is_said_aloud_and_leaves_whole_steps_only(folder: Path) -> None:
    writer, large = ArchiveWriter(folder, RUN, epoch=1), group(5, num_members=200)
    why = r"cannot write .*step_000004.* to the archive: .*free some space .*turn the archive off by"
    with largest_file(bytes_allowed=200), pytest.raises(ArchiveError, match=why):
        writer.append(step(4, large))
    assert Archive(folder, RUN).last_step == 3 and len(list(folder.iterdir())) == 3
    writer.append(step(4, large))
    assert Archive(folder, RUN).read(4, **LIMITS) == step(4, large)
