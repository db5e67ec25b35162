"""The finished members of a leased group, for those that fork from them.

A member waits here until the one that it forks from is stored. Then it begins with that member's first turns, token by
token, and needs them in the prefix cache of this engine. A stored member of an earlier lease comes with the lease.
"""

import asyncio
from collections.abc import Mapping

from slipstream.common.records.trajectory import Fork, Trajectory
from slipstream.replay.records.forks import planned_forks
from slipstream.replay.records.ticket import Lease


def parent_among(
    stored: Mapping[int, Trajectory], member: int, *, forks: Mapping[int, Fork]
) -> tuple[Trajectory, Fork] | None:
    """The parent of `member` and the fork, by the plan `forks`; None if the member begins at the start of the task.

    That is so without a parent, if the parent's episode is over at that turn, and if the parent should have been a fork
    and is none, for the same reason.
    """
    fork = forks.get(member)
    parent = stored.get(fork.parent) if fork else None
    if fork is None or parent is None or parent.fork != forks.get(fork.parent):
        return None
    return (parent, fork) if fork.num_turns < len(parent.turns) else None


class ParentLost(Exception):
    """The member that another forks from was not stored, so the whole group is lost."""


class Siblings:
    """The stored members of one lease, and those that are still played."""

    def __init__(self, lease: Lease) -> None:
        self._forks = planned_forks(lease.ticket)
        self._stored = dict(lease.stored)
        self._ended = {member: asyncio.Event() for member in lease.missing}

    async def parent_of(self, member: int) -> tuple[Trajectory, Fork] | None:
        """Wait until the parent of `member` is stored, and return `parent_among` the stored. Raises ParentLost."""
        fork = self._forks.get(member)
        if fork is not None and (ended := self._ended.get(fork.parent)) is not None:
            await ended.wait()
            if fork.parent not in self._stored:
                raise ParentLost
        return parent_among(self._stored, member, forks=self._forks)

    def add(self, trajectory: Trajectory) -> None:
        """Add a member that is stored."""
        self._stored[trajectory.member] = trajectory

    def end(self, member: int) -> None:
        """Let the forks of `member` begin: it is stored, or never will be."""
        self._ended[member].set()
