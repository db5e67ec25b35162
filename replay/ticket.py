"""What passes between the learner, the buffer and the actors: tickets, leases, groups."""

import enum

import msgspec

from common.trajectory import InvalidTrajectory, Outcome, Sampling, Task, Trajectory


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Leave to roll out one group: `num_members` attempts at `task`."""

    group_id: int  # rises from ticket to ticket, and is never used twice in a run
    task: Task
    num_members: int
    min_policy_version: int  # no token of the group may come from an older one
    sampling: Sampling
    seed: int  # of the group; a member's own follows from it, the member and the attempt

    def check_owns(self, trajectory: Trajectory, *, run_id: str, outcome: Outcome) -> None:
        """Raise InvalidTrajectory unless `trajectory` is this task tried, sampled as asked, and ended in `outcome`.

        A member ends by the policy's own doing, a partial in a preemption; other outcomes are reported with `fail`.
        """
        expected = (run_id, self.group_id, self.task, self.sampling)
        found = (trajectory.run_id, trajectory.group_id, trajectory.task, trajectory.sampling)
        if found != expected:
            raise InvalidTrajectory(f"(run_id, group_id, task, sampling) is {found}, the ticket says {expected}")
        if not 0 <= trajectory.member < self.num_members:
            raise InvalidTrajectory(f"member {trajectory.member} of a group of {self.num_members}")
        if trajectory.outcome is not outcome:
            raise InvalidTrajectory(
                f"outcome {trajectory.outcome.value} is not {outcome.value}: insert() takes what the policy ended, "
                "hand_in() what was preempted; report the rest with fail()"
            )


class Lease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The right to insert the missing members of one group, for `ttl_s` after the last heartbeat."""

    ticket: Ticket
    fence: int  # larger than that of any earlier lease; inserts under an older one are refused
    missing: dict[int, int]  # member -> attempt to make
    partials: dict[int, Trajectory]  # missing member -> the whole turns it has already, of an earlier actor's
    ttl_s: float


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sibling attempts at one task, in the order of members."""

    ticket: Ticket
    num_uses: int  # steps that it was claimed for, this one included
    trajectories: list[Trajectory]


class InsertResult(enum.Enum):
    """What became of an insert, or of a partial that was handed in."""

    STORED = "stored"
    """It is held, and survives a crash of everything."""
    DUPLICATE = "duplicate"
    """It was held already: an earlier try succeeded and its reply was lost."""
    FENCED = "fenced"
    """The lease is no longer held; nobody wants the trajectory."""
    FULL = "full"
    """The server has no room now and nothing was stored: wait, heartbeat, and insert again."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attempt that ended by somebody else's doing than the policy's."""

    group_id: int
    member: int
    attempt: int
    outcome: str  # a value of common.trajectory.Outcome
    reason: str  # at most MAX_REASON_CHARS


class Quarantined(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group that was set aside: for a payload that is no valid trajectory, or by a person's wish."""

    group_id: int
    member: int | None  # whose payload it is; None by a person's wish
    actor: str | None  # that sent the payload; None by a person's wish
    reason: str  # at most MAX_REASON_CHARS
