"""Where the next attempt of a tree leaves the earlier ones, by what these earned: the searches of a run.

An attempt continues from a state to the end of its episode, so a state's value is the mean return of the attempts that
passed it. In one tree, the same tokens lead to the same state. The choice depends on the attempts that have ended
alone, so that an actor which takes over repeats it. How it is trained: docs/search.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from slipstream.actors.search.tree_search import EXPLORATION, puct
from slipstream.common.records.trajectory import Fork, Trajectory
from slipstream.replay.records.ticket import Ticket

WIDTH = 3  # dfsdt: actions that are tried in one state


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """An attempt that has ended: how it went from state to state."""

    member: int
    begun: int  # after this many turns, which it has from another
    steps: tuple[bytes, ...]  # of each turn, its tokens and those of the answer
    total: float  # its return
    success: bool

    @classmethod
    def of(cls, attempt: Trajectory) -> "Line":
        starts = [turn.start for turn in attempt.turns]
        stops = [*starts[1:], attempt.num_tokens]
        return cls(
            member=attempt.member,
            begun=attempt.fork.num_turns if attempt.fork else 0,
            steps=tuple(attempt.tokens[4 * start : 4 * stop] for start, stop in zip(starts, stops, strict=True)),
            total=attempt.total_reward,
            success=attempt.success,
        )


def next_fork(attempts: Sequence[Trajectory], *, ticket: Ticket) -> Fork | None:
    """Where the next member of a tree leaves its ended `attempts`, the newest last; None: it begins at the start."""
    lines = [Line.of(attempt) for attempt in attempts]
    return CHOICES[ticket.search](lines, ticket.max_fork_turn) if lines else None


def by_puct(lines: Sequence[Line], max_turns: int) -> Fork | None:
    """Monte Carlo tree search: go from the start to the child with the highest score, until that is a new child.

    As in `tree_search.mcts`, the prior of a child is its share of the actions that were sampled in the state, and an
    unvisited child has the value of its parent. Actions are sampled, so a state may always have another child: it
    counts as one more action. Where all returns are equal, every attempt begins at the start.

    Two attempts from the start earned 1 and 0. A third child would score 0.5 + 1.4 / 3 * sqrt(2) = 1.16, and the first
    one scores 1 + 1.4 / 3 * sqrt(2) / 2 = 1.33. There, a new child scores 1 + 1.4 / 2 = 1.7, the only child 1.35. So
    the next attempt leaves the first one after one turn.
    """
    here, depth = lines, 0
    while True:
        children = _children(here, depth)
        score = partial(puct, parent_visits=len(here), exploration=EXPLORATION)
        counts = [sum(line.begun <= depth for line in child) for child in children]
        num_actions = sum(counts) + 1
        best, highest = list[Line](), score(_value(here), share=1 / num_actions, visits=0)
        for child, count in zip(children, counts, strict=True):
            found = score(_value(child), share=count / num_actions, visits=len(child))
            if depth < max_turns and any(len(line.steps) > depth + 1 for line in child) and found > highest:
                best, highest = child, found
        if not best:
            return _fork(here, depth)
        here, depth = best, depth + 1


def newest_first(lines: Sequence[Line], max_turns: int) -> Fork | None:
    """Depth first with backtracking, as `tree_search.dfsdt`: leave the newest attempt two states before its end.

    A state in which WIDTH actions were tried is left to the one before it. After a success, and where nothing is left
    to try, a new search begins at the start.
    """
    newest = lines[-1]
    deepest = 0 if newest.success else min(len(newest.steps) - 2, max_turns)
    for depth in range(deepest, 0, -1):
        here = [line for line in lines if line.steps[:depth] == newest.steps[:depth]]
        if len(_children(here, depth)) < WIDTH:
            return _fork(here, depth)
    return None


def best_of_depth(lines: Sequence[Line], max_turns: int) -> Fork | None:
    """Breadth first, as `tree_search.tree_of_thoughts` with a beam of 1: leave the best state of each depth in turn.

    That is one turn later than where the newest attempt began; after the deepest state, again after one turn.
    """
    later = lines[-1].begun + 1
    for depth in (later, 1) if later <= max_turns else (1,):
        states: dict[tuple[bytes, ...], list[Line]] = {}
        for line in lines:
            if len(line.steps) > depth:
                states.setdefault(line.steps[:depth], []).append(line)
        if states:
            return _fork(max(states.values(), key=_value), depth)
    return None


CHOICES: dict[str, Callable[[Sequence[Line], int], Fork | None]] = {
    "mcts": by_puct,
    "dfsdt": newest_first,
    "tree_of_thoughts": best_of_depth,
}


def _children(here: Sequence[Line], depth: int) -> list[list[Line]]:
    """The attempts through a state, by the state after it; without those that ended there."""
    children: dict[bytes, list[Line]] = {}
    for line in here:
        if len(line.steps) > depth:
            children.setdefault(line.steps[depth], []).append(line)
    return list(children.values())


def _value(lines: Sequence[Line]) -> float:
    return fmean(line.total for line in lines)


def _fork(here: Sequence[Line], depth: int) -> Fork | None:
    """The place `depth` turns after the start that the attempts `here` have, in the first that continues from it."""
    parent = next(line.member for line in here if len(line.steps) > depth)
    return Fork(parent=parent, num_turns=depth) if depth else None
