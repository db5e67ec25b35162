"""The records that learner, buffer, actors and judges exchange: tickets, leases, groups, verdicts, results."""

import enum
from typing import Annotated

import msgspec

from slipstream.common.config.replay_config import SEARCHES
from slipstream.common.process.wire import WireError, decode
from slipstream.common.records.trajectory import (
    MAX_REWARD,
    MAX_REWARDS,
    MAX_TURNS,
    InvalidTrajectory,
    Outcome,
    Sampling,
    Task,
    Trajectory,
)


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The order to roll out one group: `num_members` attempts at `task`."""

    group_id: Annotated[int, msgspec.Meta(ge=0, lt=10**14)]  # rises, and is never used twice in a run
    task: Task
    num_members: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    # The oldest version that may sample a token of the group.
    min_policy_version: Annotated[int, msgspec.Meta(ge=-1, lt=10**14)]
    # An actor that will have this version soon begins no episode of the group before.
    preferred_policy_version: Annotated[int, msgspec.Meta(ge=0, lt=10**14)] = 0
    sampling: Sampling
    seed: int  # of the group; a member's seed is made of it, the member and the attempt
    is_judged: bool = False  # a judge marks the whole group before it is ready
    num_trees: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0  # members that begin at the start; 0: all, and no trees
    max_fork_turn: Annotated[int, msgspec.Meta(ge=0, le=MAX_TURNS)] = 0  # the most turns that two members share
    # How the forks of further members are chosen, when these begin; "": at random, before anything is played.
    search: Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(SEARCHES)})?$")] = ""

    def check_owns(self, trajectory: Trajectory, *, run_id: str, outcome: Outcome) -> None:
        """Raise InvalidTrajectory unless `trajectory` is an attempt at this task as ordered, with `outcome`."""
        expected = (run_id, self.group_id, self.task, self.sampling)
        found = (trajectory.run_id, trajectory.group_id, trajectory.task, trajectory.sampling)
        if found != expected:
            raise InvalidTrajectory(f"(run_id, group_id, task, sampling) is {found}, the ticket's is {expected}")
        if not 0 <= trajectory.member < self.num_members:
            raise InvalidTrajectory(f"member is {trajectory.member}, expected 0 to {self.num_members - 1}")
        if trajectory.fork is not None and not (
            trajectory.member >= self.num_trees > 0 and trajectory.fork.num_turns <= self.max_fork_turn
        ):
            raise InvalidTrajectory(
                f"member {trajectory.member} is a {trajectory.fork}, in a group of {self.num_trees} trees whose "
                f"members share up to {self.max_fork_turn} turns"
            )
        if trajectory.outcome is not outcome:
            raise InvalidTrajectory(
                f"outcome is {trajectory.outcome.value}, expected {outcome.value}: insert() takes outcome policy, "
                "hand_in() preempted; report the others with fail()"
            )


def decode_ticket(frame: bytes, group_id: int, *, num_members: int) -> Ticket:
    """The ticket in `frame`. Raises WireError unless it is that of `group_id`, with `num_members` members."""
    ticket = decode(Ticket, frame)
    if (ticket.group_id, ticket.num_members) != (group_id, num_members):
        raise WireError(
            f"the ticket is of group {ticket.group_id} with {ticket.num_members} members, expected group {group_id} "
            f"with {num_members}"
        )
    return ticket


class Lease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The right to insert the missing members of one group; it expires `ttl_s` after the last heartbeat."""

    ticket: Ticket
    fence: int  # larger than the fence of any earlier lease; inserts under an older one are refused
    missing: dict[int, int]  # member -> number of its next attempt
    partials: dict[int, Trajectory]  # missing member -> the whole turns that an earlier actor handed in
    ttl_s: float
    num_queued: int = 0  # groups that were still queued after it
    stored: dict[int, Trajectory] = {}  # members that missing ones fork from, as an earlier actor stored them


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sibling attempts at one task, in the order of members."""

    ticket: Ticket
    num_uses: int  # steps that claimed it, including this one
    trajectories: list[Trajectory]


class Marks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the judged parts of `env.rewards` give one member, by the name of a part."""

    values: dict[str, float]  # what they measured, without weights
    rewards: dict[str, float]  # what they add to the last turn


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The marks of every member, in the order of members; none if the judge could not read the group."""

    judge: str
    members: list[Marks]


def with_verdict(trajectories: list[Trajectory], verdict: Verdict) -> list[Trajectory]:
    """Return the members of a group with the judge's marks. Raises InvalidTrajectory if the verdict does not fit."""
    if len(verdict.members) != len(trajectories):
        raise InvalidTrajectory(f"the verdict has marks for {len(verdict.members)} of {len(trajectories)} members")
    return [_marked(trajectory, marks) for trajectory, marks in zip(trajectories, verdict.members, strict=True)]


def _marked(trajectory: Trajectory, marks: Marks) -> Trajectory:
    last = trajectory.turns[-1]
    for before, added in ((last.rewards, marks.rewards), (trajectory.part_values, marks.values)):
        if twice := before.keys() & added.keys():
            raise InvalidTrajectory(f"the verdict has {', '.join(sorted(twice))}, which the trajectory has already")
        if len(before) + len(added) > MAX_REWARDS:
            raise InvalidTrajectory(f"the verdict adds {len(added)} to {len(before)}, the limit is {MAX_REWARDS}")
        if not all(-MAX_REWARD <= number <= MAX_REWARD for number in added.values()):  # also false for NaN
            raise InvalidTrajectory(
                f"the verdict {added} contains a value that is not finite, or beyond {MAX_REWARD:g}"
            )
    return msgspec.structs.replace(
        trajectory,
        turns=[*trajectory.turns[:-1], msgspec.structs.replace(last, rewards={**last.rewards, **marks.rewards})],
        part_values={**trajectory.part_values, **marks.values},
        shown="",  # not needed any more, and archives stay small
    )


class InsertResult(enum.Enum):
    """The result of `insert` and of `hand_in`."""

    STORED = "stored"
    """It is stored, and survives a crash of every process."""
    DUPLICATE = "duplicate"
    """It was stored already: an earlier call succeeded and its reply was lost."""
    FENCED = "fenced"
    """The lease is lost, and the trajectory is not needed."""
    FULL = "full"
    """The server has no memory left and stored nothing: wait, heartbeat, and insert again."""
