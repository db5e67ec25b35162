"""Stores and validates trajectory payloads, when sent and again when read; finds those that the books do not name."""

from collections.abc import Set
from typing import NamedTuple

import redis

from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.wire import WireError, compressed, encode
from slipstream.common.records.trajectory import (
    MAX_TRAJECTORY_BYTES,
    InvalidTrajectory,
    Outcome,
    Trajectory,
    check,
    decode_trajectory,
)
from slipstream.replay.buffer.bulk import Bulk, Payload
from slipstream.replay.records import scripts
from slipstream.replay.records.ticket import Ticket

MAX_DURATION_MS = 1e12  # of an episode: an actor's wrong clock must not spoil the books
SCAN_KEYS = 10_000  # keys in one reply of SCAN
BATCH_KEYS = 1_000  # keys that one run of a script checks
KINDS = {Outcome.POLICY: "blob", Outcome.PREEMPTED: "partial"}  # as the keys of payloads name them


class LostPayload(LookupError):
    """A payload that the books name is missing: the server lost what it had acknowledged."""


Unusable = LostPayload | WireError | InvalidTrajectory
"""The reason that a payload cannot be trained on: it is missing, malformed or invalid."""


class Sent(NamedTuple):
    """Who sent a payload, and the attempt and the fence, which its key contains."""

    actor: str
    attempt: int
    fence: int


class Entry(NamedTuple):
    """One payload, as the books name it."""

    ticket: Ticket
    member: int
    record: bytes  # as record_of() wrote it


def record_of(trajectory: Trajectory, *, fence: int, num_bytes: int) -> str:
    """The record of a payload of `num_bytes` in the books: what its key is made of, what it cost, and its actor."""
    duration_ms = round(min(max(0.0, 1000 * trajectory.duration_s), MAX_DURATION_MS))
    return (
        f"{trajectory.attempt}:{fence}:{trajectory.newest_policy_version}:{num_bytes}:{trajectory.num_own_tokens}:"
        f"{len(trajectory.own_turns)}:{duration_ms}:{trajectory.actor}"
    )


def result_of(trajectory: Trajectory) -> tuple[str, ...]:
    """The result of an episode for the books: environment, return, and "1" for a success or "0"; () for a partial."""
    if trajectory.outcome is not Outcome.POLICY:
        return ()
    return trajectory.task.env, repr(trajectory.total_reward), str(int(trajectory.success))


def read_record(record: bytes) -> Sent:
    """What record_of() wrote. Raises ValueError if it is malformed."""
    attempt, fence, *_, actor = record.split(b":", 7)
    return Sent(actor=actor.decode(errors="replace"), attempt=int(attempt), fence=int(fence))


class Payloads:
    """The payloads of one stream. The key of each one contains the attempt and the fence under which it was sent."""

    def __init__(self, client: redis.Redis, base: str, run_id: str, replay: ReplayConfig, *, vocab_size: int) -> None:
        """`MAX_TRAJECTORY_BYTES` limits a frame, and also its size when decompressed."""
        self.bulk = Bulk(client, max_bytes=MAX_TRAJECTORY_BYTES)
        self._base = base
        self._run_id = run_id
        self._vocab_size = vocab_size
        self._compress = replay.compress  # of the frames that are sent

    def name(self, group_id: int, member: int, attempt: int, fence: int, *, outcome: Outcome) -> str:
        """The key of the payload of an attempt that ended in `outcome`."""
        return f"{self._base}:{KINDS[outcome]}:{group_id}:{member}:{attempt}:{fence}"

    def encode(self, ticket: Ticket, trajectory: Trajectory, *, outcome: Outcome) -> bytes:
        """The frame of an attempt at `ticket` that ended in `outcome`. Raises InvalidTrajectory."""
        check(trajectory, vocab_size=self._vocab_size)
        ticket.check_owns(trajectory, run_id=self._run_id, outcome=outcome)
        try:
            frame = encode(trajectory)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidTrajectory(f"cannot be encoded: {error}") from error
        if len(frame) > MAX_TRAJECTORY_BYTES:
            raise InvalidTrajectory(
                f"{len(frame)} bytes, the limit is {MAX_TRAJECTORY_BYTES}; lower `model.max_tokens`"
            )
        return compressed(frame) if self._compress else frame

    def read(self, entries: list[Entry], *, outcome: Outcome) -> list[Trajectory | Unusable]:
        """The trajectory of each entry, or the reason that it cannot be used."""
        return self.bulk.read(
            [self._name_of(entry, outcome) for entry in entries],
            lambda number, frame: self._checked(entries[number], frame, outcome),
        )

    def _name_of(self, entry: Entry, outcome: Outcome) -> str:
        sent = read_record(entry.record)
        return self.name(entry.ticket.group_id, entry.member, sent.attempt, sent.fence, outcome=outcome)

    def _checked(self, entry: Entry, frame: Payload, outcome: Outcome) -> Trajectory | Unusable:
        if frame is None:
            return LostPayload(f"the payload of group {entry.ticket.group_id} member {entry.member} is missing")
        if isinstance(frame, WireError):
            return frame
        try:
            trajectory = decode_trajectory(frame, max_bytes=MAX_TRAJECTORY_BYTES, vocab_size=self._vocab_size)
            entry.ticket.check_owns(trajectory, run_id=self._run_id, outcome=outcome)
        except (WireError, InvalidTrajectory) as error:
            return error
        if trajectory.member != entry.member:
            return InvalidTrajectory(f"its member is {trajectory.member}, and it was stored as member {entry.member}")
        return trajectory


def strays(client: redis.Redis, base: str, *, known: Set[str] = frozenset()) -> list[bytes]:
    """The keys of groups and payloads that the books do not name, without `known` ones and inserts in flight."""
    kinds = tuple(f"{base}:{kind}:".encode() for kind in ("group", "blob", "partial"))
    found = client.scan_iter(match=f"{base}:*", count=SCAN_KEYS)
    names = [name for name in found if name.startswith(kinds) and name.decode(errors="replace") not in known]
    unnamed = scripts.load(client, "prelude", "unnamed")  # the books may have changed since `known` was read
    batches = (names[start : start + BATCH_KEYS] for start in range(0, len(names), BATCH_KEYS))
    return [name for batch in batches for name in unnamed(keys=[base, *batch])]
