"""Where the members of a group fork from each other, chosen before any of them is played.

A group of `num_trees` trees begins with as many members. Each further one begins with the first turns of an earlier
member of its tree, and then samples its own. Tree t has the members t, t + num_trees, t + 2 * num_trees and so on.

The choice depends on the run's seed and the group's id alone, never on what was played. A choice among the turns of a
finished episode would depend on its length, and so on the actions that are trained: the gradient would be biased
(docs/search.md). An episode may therefore be over before the turn at which a member shall leave it. Then that member
begins at the start of the task.

With a search nothing is chosen before: `slipstream.actors.search.next_fork` chooses when a member begins.
"""

import random
from collections.abc import Collection

from slipstream.common.records.trajectory import Fork
from slipstream.replay.records.ticket import Ticket


def awaited(ticket: Ticket) -> dict[int, Collection[int]]:
    """For each further member, those that must have ended before it begins: its parent, or all that a search sees."""
    if not ticket.search:
        return {member: (fork.parent,) for member, fork in planned_forks(ticket).items()}
    at_once = ticket.num_trees  # they all leave the same place
    return {member: range(member - member % at_once) for member in range(at_once, ticket.num_members)}


def planned_forks(ticket: Ticket) -> dict[int, Fork]:
    """The fork of each member that has one, without a search.

    Each is drawn evenly from all places at which the members before it in its tree may be left: after 1 to
    `max_fork_turn` turns, and after more turns than the member has from its own parent. So a place has one name.
    """
    chance = random.Random(f"forks of group {ticket.group_id}, seed {ticket.seed}")
    forks: dict[int, Fork] = {}
    for member in range(ticket.num_trees, ticket.num_members if ticket.num_trees else 0):
        earlier = range(member % ticket.num_trees, member, ticket.num_trees)
        places = [
            Fork(parent=parent, num_turns=num_turns)
            for parent in earlier
            for num_turns in range(_num_shared(forks, parent) + 1, ticket.max_fork_turn + 1)
        ]
        forks[member] = chance.choice(places)
    return forks


def _num_shared(forks: dict[int, Fork], member: int) -> int:
    return forks[member].num_turns if member in forks else 0
