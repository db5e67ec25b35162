"""Advises a number of actors, from what the last steps of a run measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Advice needs this many steps with the same number of actors: a single step is noise.
WINDOW = 5
MEMORY = 100  # steps; advice that is older is forgotten
MUCH_WAIT, NO_WAIT = 0.15, 0.05  # fractions of a step; between the two the advice stays, so that it does not swing
IDLE_USE, GOOD_USE = 0.7, 0.85  # fractions of the actors' slots; between the two the advice stays


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLoad:
    """Which side waited for the other in one step."""

    num_actors: int
    learner_wait: float  # fraction of the step that the learner waited for its batch
    slots_used: float  # fraction of the actors' slots that played an episode, in [0, 1]
    has_queue: bool  # whether groups waited for an actor


def advised_actors(loads: Sequence[StepLoad]) -> int:
    """The advised number of actors, at least 1; `loads` are the last MEMORY steps, oldest first.

    Of the newest WINDOW steps in a row that had the same number n of actors:

        the learner waits, and groups wait for an actor:   n / (1 - wait), at most 2 n
        the learner does not wait, and slots are empty:    n * used / GOOD_USE, at least n / 2
        otherwise:                                         n

    With four actors and a learner that waits for half of each step, the advice is 8. If the learner waits but no group
    does, more actors would have nothing to play; then `replay.target_lag` is too small.

    While actors come and go there are no such steps, and the advice stays: an actor that was lost is to be replaced.
    Without any it is the number of actors.
    """
    for stop in range(len(loads), WINDOW - 1, -1):
        recent = loads[stop - WINDOW : stop]
        if all(load.num_actors == recent[0].num_actors for load in recent):
            return max(_advised_by(recent), 1)
    return max(loads[-1].num_actors, 1) if loads else 1


def _advised_by(recent: Sequence[StepLoad]) -> int:
    """The advice of steps with the same number of actors."""
    num_actors = recent[0].num_actors
    wait = sum(load.learner_wait for load in recent) / WINDOW
    used = sum(load.slots_used for load in recent) / WINDOW
    queues = sum(load.has_queue for load in recent)
    if wait > MUCH_WAIT and 2 * queues > WINDOW:
        return min(math.ceil(num_actors / max(1 - wait, 0.5)), 2 * num_actors)
    if wait < NO_WAIT and used < IDLE_USE:
        return max(math.ceil(num_actors * used / GOOD_USE), math.ceil(num_actors / 2))
    return num_actors
