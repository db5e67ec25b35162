"""Bugs that are planted, so that the simulation shows that it finds them; many are mended ones of this project."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.learner.checkpoint import checkpoint
from slipstream.learner.checkpoint.fence import Fence
from slipstream.learner.lead import lead
from slipstream.learner.lead.lead import Lead
from slipstream.replay.buffer import actor_buffer
from slipstream.replay.buffer.bulk import packed
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.run.archive import ArchiveError, ArchiveWriter
from slipstream.tools.lab.sim.store import Patches

_APPEND, _SETTLE, _PREPARE, _PACKED = ArchiveWriter.append, LearnerBuffer.settle, Lead.prepare_checkpoint, packed


def _settle_ahead(self: LearnerBuffer, step: int) -> int:
    return _SETTLE(self, step + 1 if step else 0)


def _prepare_and_settle(self: Lead, progress: Any) -> Any:
    self.connections.train.settle(progress.step)
    return _PREPARE(self, progress)


def _overwriting(*commands: Any) -> bytes:
    return _PACKED(*[command[:-1] if command[-1] == "NX" else command for command in commands])


def _keep_oldest(folder: Path, keep: int) -> None:
    for path in checkpoint.finished_checkpoints(folder)[keep:]:
        checkpoint._remove(path)


def _append_unfenced(self: ArchiveWriter, archived: Any) -> None:
    check, self._check = self._check, lambda: None
    try:
        _APPEND(self, archived)
    except ArchiveError:
        check()
        raise
    finally:
        self._check = check


def _unchecked(*arguments: Any, check: Any, **named: Any) -> ArchiveWriter:
    return ArchiveWriter(*arguments, **named)


@contextlib.contextmanager
def _held_by_all(self: Fence) -> Iterator[None]:
    yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """A bug, as changes of the scripts' text or of attributes."""

    name: str
    mended_by: str = ""  # the commit of this project that mended it
    scripts: Patches = ()
    attributes: tuple[tuple[Any, str, Any], ...] = ()

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in self.attributes]
        try:
            for owner, name, value in self.attributes:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


def _script(name: str, old: str, new: str, mended_by: str = "") -> Bug:
    return Bug(name=name, mended_by=mended_by, scripts=((old, new),))


def _attribute(name: str, owner: Any, attribute: str, value: Any, mended_by: str = "") -> Bug:
    return Bug(name=name, mended_by=mended_by, attributes=((owner, attribute, value),))


BUGS = [
    _script("an insert leaves its payload to expire", "redis.call('PERSIST', KEYS[2]) == 0", "false"),
    _script("an insert ignores its fence", "if stored or facts[2] ~= fence or", "if stored or"),
    _script(
        "an insert whose reply was lost is refused",
        "if stored and read_record(stored) == payload then",
        "if stored and false then",
    ),
    _script(
        "a settled group stays claimed", "  leave(id, 'claimed')\n  close(id, 'trained')", "  close(id, 'trained')"
    ),
    _script("a lost lease keeps its fence", "redis.call('HDEL', group_key(id), unpack(LEASE[state]))", ""),
    _script("a partial stays beside a newer one", "remove_partial(id, member, 'discarded:superseded')\nredis", "redis"),
    _script("a claim that comes again claims more", "if number > last_number then", "if true then", "2a96833e"),
    _script("an epoch counts from 1", "last + 1 or 0, now_ms())", "last + 1 or 0, 1)", "c363e239"),
    _script("a fence counts from 1", "if fence >= clock and fence < 1e14", "if fence < 1e14", "c5a5f39f"),
    _script("a replaced learner may claim", "if refusal then return refusal end\nlocal number", "local number"),
    _attribute("a step is settled before its checkpoint", Lead, "prepare_checkpoint", _prepare_and_settle, "ada1a708"),
    _attribute("one step too many is settled", LearnerBuffer, "settle", _settle_ahead),
    _attribute("a restart takes no claim back", LearnerBuffer, "reopen", lambda *_: 0),
    _attribute("a group comes again and is trained", LearnerBuffer, "_came_before", lambda *_: False, "4b9d9500"),
    _script(
        "a payload that is played again drops its group",
        "if redis.call('HGET', group_key(id), 'member:' .. ARGV[4]) ~= ARGV[5] then return end",
        "",
        "81617109",
    ),
    _attribute("a restart uses its version again", Lead, "with_fresh_version", lambda _, progress: progress),
    _attribute("the highest version is not read", lead, "load_highest_version", lambda _: -1, "f4b06a90"),
    _attribute("the highest version is not written", lead, "save_highest_version", lambda *_: None, "f4b06a90"),
    _attribute("the archive is not synced", ArchiveWriter, "sync", lambda _: None),
    _attribute("a replaced learner writes checkpoints", Fence, "held", _held_by_all, "75adae4e"),
    _attribute("a replaced learner blames its archive", lead, "ArchiveWriter", _unchecked, "eeda4136"),
    _attribute(
        "a step of a replaced learner stays in the archive", ArchiveWriter, "append", _append_unfenced, "50add184"
    ),
    _attribute("an old checkpoint is kept in place of the new", checkpoint, "_keep_newest", _keep_oldest, "722e5c70"),
    _attribute("a payload may be sent over a stored one", actor_buffer, "packed", _overwriting),
]
NO_BUG = Bug(name="none")
