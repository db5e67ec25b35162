"""What the groups of a stream weigh: the frames of their members, judged before they are sent and again when read."""

import redis

from common.trajectory import InvalidTrajectory, Outcome, Trajectory, check, decode_trajectory, encode_trajectory
from common.wire import WireError, compressed
from replay.bulk import Bulk, Payload
from replay.ticket import Ticket


class LostPayload(LookupError):
    """A payload that the books name is not there: the server lost what it had acknowledged."""


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
        frame = encode_trajectory(trajectory)
        if len(frame) > self._max_bytes:
            raise InvalidTrajectory(
                f"{len(frame)} bytes, `replay.max_trajectory_bytes` is {self._max_bytes}; raise it, or lower "
                "`model.max_tokens`"
            )
        return compressed(frame) if self._compress else frame

    def read(self, names: list[str]) -> list[Payload]:
        """The frames, in the order of their names, in memory that this thread's next reading overwrites."""
        return self.bulk.read([names], lambda _, frames: frames)[0] if names else []

    def decode(self, ticket: Ticket, member: int, frame: Payload, *, outcome: Outcome) -> Trajectory:
        """The attempt that was stored as `member`. Raises LostPayload, WireError, InvalidTrajectory."""
        if frame is None:
            raise LostPayload(f"the payload of group {ticket.group_id} member {member} is gone")
        if isinstance(frame, WireError):
            raise frame
        trajectory = decode_trajectory(frame, max_bytes=self._max_bytes, vocab_size=self._vocab_size)
        ticket.check_owns(trajectory, run_id=self._run_id, outcome=outcome)
        if trajectory.member != member:
            raise InvalidTrajectory(f"says that it is member {trajectory.member}, and was stored as {member}")
        return trajectory


INVALID = (WireError, InvalidTrajectory)
"""What `Payloads.decode` raises for a payload that is there and cannot be used."""
