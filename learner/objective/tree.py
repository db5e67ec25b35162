"""The advantage among attempts that fork from each other: of siblings at each node, and of trees.

Attempts are the leaves of trees. A node is a turn at which attempts leave each other; a segment is what one attempt
sampled from a node to the next one, or to its end. See docs/search.md for the derivation.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from slipstream.common.records.trajectory import Fork


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One attempt."""

    total: float  # its return
    num_turns: int
    fork: Fork | None  # None: it begins at the start


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnCredit:
    """Of each turn of an attempt: its advantage, and its weight in the loss. Both are 0 in turns of a parent."""

    advantages: Float[np.ndarray, " turns"]
    weights: Float[np.ndarray, " turns"]


def tree_advantages(leaves: Sequence[Leaf], *, num_trees: int) -> list[TurnCredit]:
    """Compare each segment with its siblings, the other segments that begin at the same node.

        value(segment)     = return of the attempt, if it ends with the segment
                             mean of value over the segments that begin at the node where it ends, otherwise
        advantage(segment) = value(segment) - mean of value over its siblings
        weight(segment)    = weight(segment before the node) / number of segments that begin at the node

    The first `num_trees` leaves begin at the start. Each of these has weight 1, and is compared with the others of
    them. Any further leaf without a parent should have been a fork, but the attempt that it should have left was over
    by then. It has weight 1 as well, and is compared with all others at the start.

    The sum of weight * advantage * gradient of the log-probability over all segments has the policy gradient as its
    mean, times the mean number of leaves without a parent, if places of forks are drawn before anything is played.
    Parents must have lower numbers than their forks.

    Two trees. The second leaf of the first, with return 0, leaves the first leaf, with return 1, after one turn of two:

    >>> fork = Fork(parent=0, num_turns=1)
    >>> leaves = [(1.0, None), (0.0, None), (0.0, fork)]
    >>> found = tree_advantages([Leaf(total=total, num_turns=2, fork=fork) for total, fork in leaves], num_trees=2)
    >>> [credit.advantages.tolist() for credit in found]  # value of the first tree: (1 + 0) / 2
    [[0.5, 1.0], [-0.5, -0.5], [0.0, -1.0]]
    >>> [credit.weights.tolist() for credit in found]
    [[1.0, 0.5], [1.0, 1.0], [0.0, 0.5]]
    """
    forks = _by_node(leaves)
    values, at_nodes = _values(leaves, forks)
    credits = [TurnCredit(advantages=np.zeros(leaf.num_turns), weights=np.zeros(leaf.num_turns)) for leaf in leaves]
    starts = [member for member, leaf in enumerate(leaves) if leaf.fork is None]
    planned = [values[member] for member in starts if member < num_trees]
    for member in starts:
        compared = planned if member < num_trees else [values[other] for other in starts]
        _give(credits[member], 0, above=values[member] - _mean_of_others(compared, values[member]), weight=1.0)
    for member in range(len(leaves)):
        for turn in sorted(forks[member]):
            segments = [member, *forks[member][turn]]
            for segment, value in zip(segments, at_nodes[member, turn], strict=True):
                others = _mean_of_others(at_nodes[member, turn], value)
                weight = float(credits[member].weights[turn - 1]) / len(segments)
                _give(credits[segment], turn, above=value - others, weight=weight)
    return credits


def _by_node(leaves: Sequence[Leaf]) -> dict[int, dict[int, list[int]]]:
    """The members that leave a member, by the turn at which they do."""
    forks: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for member, leaf in enumerate(leaves):
        if leaf.fork is not None:
            forks[leaf.fork.parent][leaf.fork.num_turns].append(member)
    return forks


def _values(
    leaves: Sequence[Leaf], forks: dict[int, dict[int, list[int]]]
) -> tuple[list[float], dict[tuple[int, int], list[float]]]:
    """The value of each member's first own segment; and those of the segments at each node, its own first.

    Forks have higher numbers than their parents, so they are there before.
    """
    values = [leaf.total for leaf in leaves]
    at_nodes = {}
    for member in reversed(range(len(leaves))):
        for turn in sorted(forks[member], reverse=True):
            at_nodes[member, turn] = [values[member], *(values[fork] for fork in forks[member][turn])]
            values[member] = float(np.mean(at_nodes[member, turn]))
    return values, at_nodes


def _mean_of_others(values: Sequence[float], own: float) -> float:
    return (sum(values) - own) / (len(values) - 1)


def _give(credit: TurnCredit, turn: int, *, above: float, weight: float) -> None:
    """Give all turns from `turn` on the numbers of a segment; segments that begin later overwrite them."""
    credit.advantages[turn:] = above
    credit.weights[turn:] = weight
