"""What equal returns mean: where no sibling does better than another, nothing is learned, and the success says why."""

import enum
from collections.abc import Collection

SOLVED_SUCCESS, HOPELESS_SUCCESS = 0.95, 0.05  # shares of the episodes that solved their task
FEWEST_USEFUL = 1 / 8  # never open more than this many times the groups that are needed


class Outlook(enum.Enum):
    """Why nothing is learned, and what to do."""

    SOLVED = "the tasks are solved: stop here, or use harder tasks"
    HOPELESS = "no episode earns anything: use a warm start, easier tasks or partial rewards"
    STUCK = (
        "siblings earn the same: use easier or harder tasks, larger groups, or an `objective.advantage` that does not "
        "compare siblings, such as reinforce_pp"
    )


def outlook(*, success: float, mean_return: float) -> Outlook:
    """The outlook of episodes that taught nothing, of which the share `success` solved their task."""
    if success >= SOLVED_SUCCESS:
        return Outlook.SOLVED
    if success <= HOPELESS_SUCCESS and mean_return <= 0:
        return Outlook.HOPELESS
    return Outlook.STUCK


def useful_share(taught: Collection[bool], *, assumed: int) -> float:
    """The share of groups that teach, by which of the newest taught, as if `assumed` groups before them all had."""
    return max((assumed + sum(taught)) / (assumed + len(taught)), FEWEST_USEFUL)
