"""What the groups of a stream weigh: the frames of their members, judged before they are sent and again when read."""

from typing import NamedTuple

import redis

from common.trajectory import InvalidTrajectory, Outcome, Trajectory, check, decode_trajectory, encode_trajectory
from common.wire import WireError, compressed
from replay.bulk import Bulk, Payload
from replay.ticket import Ticket

MAX_DURATION_MS = 1e12  # of an episode; its clock may be wrong, the books are not


class LostPayload(LookupError):
    """A payload that the books name is not there: the server lost what it had acknowledged."""


Unusable = LostPayload | WireError | InvalidTrajectory
"""Why what the books name is no trajectory to train on: it is gone, or not what it should be."""


class Entry(NamedTuple):
    """What the books say of one payload."""

    ticket: Ticket
    member: int
    record: bytes  # as record_of() wrote it


def record_of(trajectory: Trajectory, *, fence: int, num_bytes: int) -> str:
    """What the books keep of a payload of `num_bytes`: where it lies, what it took to make, and who made it."""
    duration_ms = round(min(max(0.0, 1000 * trajectory.duration_s), MAX_DURATION_MS))
    return (
        f"{trajectory.attempt}:{fence}:{trajectory.oldest_policy_version}:{num_bytes}:{trajectory.num_tokens}:"
        f"{len(trajectory.turns)}:{duration_ms}:{trajectory.actor}"
    )


def sender_of(record: bytes) -> str:
    """The actor that a record names."""
    return record.decode(errors="replace").split(":", 7)[7]


class Payloads:
    """The frames under `base`. A member's, or its partial's, are named by the attempt and the fence that sent them."""

    def __init__(
        self, client: redis.Redis, base: str, run_id: str, *, vocab_size: int, max_bytes: int, compress: bool
    ) -> None:
        """`max_bytes` is of a frame, and of what it becomes when decompressed; `compress` is for what is sent."""
        self.bulk = Bulk(client, base, max_bytes=max_bytes)
        self._base = base
        self._run_id = run_id
        self._vocab_size = vocab_size
        self._max_bytes = max_bytes
        self._compress = compress

    def name(self, kind: str, group_id: int, member: int, attempt: int, fence: int) -> str:
        """Where a payload lives; `kind` is blob for a member, partial for a partial."""
        return f"{self._base}:{kind}:{group_id}:{member}:{attempt}:{fence}"

    def encode(self, ticket: Ticket, trajectory: Trajectory, *, outcome: Outcome) -> bytes:
        """The frame of an attempt at `ticket` that ended in `outcome`. Raises InvalidTrajectory."""
        check(trajectory, vocab_size=self._vocab_size)
        ticket.check_owns(trajectory, run_id=self._run_id, outcome=outcome)
        try:
            frame = encode_trajectory(trajectory)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidTrajectory(f"cannot be written: {error}") from error
        if len(frame) > self._max_bytes:
            raise InvalidTrajectory(
                f"{len(frame)} bytes, `replay.max_trajectory_bytes` is {self._max_bytes}; raise it, or lower "
                "`model.max_tokens`"
            )
        return compressed(frame) if self._compress else frame

    def read(self, kind: str, entries: list[Entry], *, outcome: Outcome) -> list[Trajectory | Unusable]:
        """What is stored under each entry, or why it cannot be used."""
        return self.bulk.read(
            [self._name_of(kind, entry) for entry in entries],
            lambda number, frame: self._judged(entries[number], frame, outcome),
        )

    def _name_of(self, kind: str, entry: Entry) -> str:
        attempt, fence, _ = entry.record.split(b":", 2)
        return self.name(kind, entry.ticket.group_id, entry.member, int(attempt), int(fence))

    def _judged(self, entry: Entry, frame: Payload, outcome: Outcome) -> Trajectory | Unusable:
        if frame is None:
            return LostPayload(f"the payload of group {entry.ticket.group_id} member {entry.member} is gone")
        if isinstance(frame, WireError):
            return frame
        try:
            trajectory = decode_trajectory(frame, max_bytes=self._max_bytes, vocab_size=self._vocab_size)
            entry.ticket.check_owns(trajectory, run_id=self._run_id, outcome=outcome)
        except (WireError, InvalidTrajectory) as error:
            return error
        if trajectory.member != entry.member:
            return InvalidTrajectory(f"says that it is member {trajectory.member}, and was stored as {entry.member}")
        return trajectory
