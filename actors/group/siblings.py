"""The finished members of a leased group, for those that fork from them.

A member waits here until the one that it forks from is stored; with a search, until all are among which it chooses. It
begins with that member's first turns, token by token, and needs them in the prefix cache of this engine. A stored
member of an earlier lease comes with the lease.
"""

import asyncio
from collections.abc import Mapping

from slipstream.actors.search.next_fork import next_fork
from slipstream.common.records.trajectory import Fork, Trajectory
from slipstream.replay.records.forks import awaited, planned_forks
from slipstream.replay.records.ticket import Lease, Ticket


def parent_among(stored: Mapping[int, Trajectory], member: int, *, ticket: Ticket) -> tuple[Trajectory, Fork] | None:
    """The parent of `member` and the fork, if those that it awaits have ended; None if it begins at the start.

    Without a search that is so without a parent, if the parent's episode is over at that turn, and if the parent should
    have been a fork and is none, for the same reason.
    """
    if ticket.search:
        chosen = next_fork([stored[each] for each in awaited(ticket).get(member, ()) if each in stored], ticket=ticket)
        return (stored[chosen.parent], chosen) if chosen else None
    forks = planned_forks(ticket)
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
        self._ticket, self._awaited = lease.ticket, awaited(lease.ticket)
        self._stored = dict(lease.stored)
        self._ended = {member: asyncio.Event() for member in lease.missing}

    async def parent_of(self, member: int) -> tuple[Trajectory, Fork] | None:
        """Wait until those that `member` awaits are stored, and return `parent_among` these. Raises ParentLost."""
        for earlier in self._awaited.get(member, ()):
            if (ended := self._ended.get(earlier)) is not None:
                await ended.wait()
                if earlier not in self._stored:
                    raise ParentLost
        return parent_among(self._stored, member, ticket=self._ticket)

    def add(self, trajectory: Trajectory) -> None:
        """Add a member that is stored."""
        self._stored[trajectory.member] = trajectory

    def end(self, member: int) -> None:
        """Let the forks of `member` begin: it is stored, or never will be."""
        self._ended[member].set()
