"""The advantage among attempts that fork from each other: of siblings at each node, and of trees.

Attempts are the leaves of trees. A node is a turn at which attempts leave each other; a segment is what one attempt
sampled from a node to the next one, or to its end. Forks at random and forks of a search have an estimator each, as the
first one is biased where returns choose the nodes. See docs/search.md for both derivations.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.records.trajectory import Fork, Trajectory
from slipstream.learner.credit.measured_trajectory import MeasuredTrajectory
from slipstream.learner.credit.token_rewards import TokenCredit, tokens_of_turns
from slipstream.replay.records.ticket import Group


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


def tree(
    groups: Sequence[Group], episodes: Sequence[Sequence[MeasuredTrajectory]], objective: ObjectiveConfig
) -> list[TokenCredit]:
    """One advantage for each turn, compared at the node where its segment begins; its weight in the loss multiplies it.

    Penalties are subtracted from the returns. A token that several attempts share is trained in one of them. Weights
    are scaled so that the loss stays a mean: over its tokens, or with normalisation `constant` over its attempts.
    """
    trajectories, credits = list[Trajectory](), list[TurnCredit]()
    for group, members in zip(groups, episodes, strict=True):
        returns = [member.trajectory.total_reward - float(member.penalties.sum()) for member in members]
        leaves = leaves_of(group.trajectories, returns)
        estimator = search_advantages if group.ticket.search else tree_advantages
        credits += estimator(leaves, num_trees=group.ticket.num_trees or len(leaves))
        trajectories += group.trajectories
    tokens = [tokens_of_turns(trajectory) for trajectory in trajectories]
    total_weight = sum(float((credit.weights * each).sum()) for credit, each in zip(credits, tokens, strict=True))
    num_trained = sum(int(each[credit.weights > 0].sum()) for credit, each in zip(credits, tokens, strict=True))
    scale = num_trained / total_weight
    if objective.normalisation == "constant":
        # Of weight 1 are those that a search began anywhere, and at random those that began at the start.
        scale = len(trajectories) / sum(bool(credit.weights.max() == 1) for credit in credits)
    found = []
    for trajectory, credit, each in zip(trajectories, credits, tokens, strict=True):
        of_sampled = np.repeat(scale * credit.weights * credit.advantages, each)
        first = int(np.flatnonzero(credit.weights)[0])
        found.append(TokenCredit(advantages=of_sampled, trained_from=trajectory.turns[first].start))
    return found


def why_not_trained(trajectories: Sequence[Trajectory], objective: ObjectiveConfig) -> str:
    """Why `objective` cannot train attempts that were made for another one; "" if it can.

    A run may be resumed with another objective than its waiting groups were played for, and an archive re-run with one.
    """
    if objective.compares != "forks" and any(trajectory.fork for trajectory in trajectories):
        return (
            f"its attempts fork from each other, and objective.advantage {objective.advantage} would train the tokens "
            "that they share once for each of them; choose tree"
        )
    if objective.teacher_url and any(trajectory.kept for trajectory in trajectories):
        return (
            "its tokens were sampled from kept sets, and a teacher behind a URL gives log-probabilities of the whole "
            "distribution; use a folder as objective.reference_model"
        )
    return ""


def leaves_of(trajectories: Sequence[Trajectory], returns: Sequence[float]) -> list[Leaf]:
    """Return a leaf for each member of a group, in their order.

    A fork whose parent has other tokens there is no fork of it: it begins at the start then. So is one whose parent is
    over at that turn.
    """
    forks: list[Fork | None] = []
    for trajectory in trajectories:
        fork = _first_place(trajectory.fork, forks)
        if fork is not None and not _shares(trajectory, trajectories[fork.parent], fork.num_turns):
            fork = None
        forks.append(fork)
    return [
        Leaf(total=total, num_turns=len(trajectory.turns), fork=fork)
        for trajectory, total, fork in zip(trajectories, returns, forks, strict=True)
    ]


def _first_place(fork: Fork | None, before: Sequence[Fork | None]) -> Fork | None:
    """The same place in the first member that sampled it: a fork may name a member that has it from a parent."""
    while fork is not None and (earlier := before[fork.parent]) is not None and fork.num_turns <= earlier.num_turns:
        fork = Fork(parent=earlier.parent, num_turns=fork.num_turns)
    return fork


def _shares(trajectory: Trajectory, parent: Trajectory, num_turns: int) -> bool:
    """Whether both have the same tokens and log-probabilities before turn `num_turns`, and the parent has that turn."""
    if num_turns >= len(parent.turns):
        return False
    stop = 4 * trajectory.turns[num_turns].start
    return (
        trajectory.tokens[:stop] == parent.tokens[:stop]
        and trajectory.behaviour_logprobs[:stop] == parent.behaviour_logprobs[:stop]
        and trajectory.turns[num_turns].start == parent.turns[num_turns].start
    )


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


def search_advantages(leaves: Sequence[Leaf], *, num_trees: int) -> list[TurnCredit]:
    """Compare each attempt from its node on with those that were there before it, as the search did that chose it.

        advantage(attempt) = return - mean return of the earlier attempts through the node where it begins
        weight(attempt)    = 1, in the turns that it sampled itself

    The first `num_trees` begin at the start, and are compared with each other. The sum of weight * advantage * gradient
    of the log-probability has as its mean the sum of the gradients of value(node) over the nodes where attempts begin:
    what a node's attempt earns does not depend on why it was chosen, nor does a mean over earlier attempts. So nodes
    count as often as the search begins there, not as often as the policy reaches them. A policy with parameters of its
    own for each state gets a positive multiple of its gradient in each of them.

    `tree_advantages` would replace a return by a mean with those of later attempts, which were played because of it.

    Two forks begin after the first turn of the first attempt. The second of them is compared with 1 and 0:

    >>> fork = Fork(parent=0, num_turns=1)
    >>> leaves = [(1.0, None), (0.5, None), (0.0, fork), (1.0, fork)]
    >>> found = search_advantages([Leaf(total=total, num_turns=2, fork=fork) for total, fork in leaves], num_trees=2)
    >>> [credit.advantages.tolist() for credit in found]
    [[0.5, 0.5], [-0.5, -0.5], [0.0, -1.0], [0.0, 0.5]]
    """
    credits = []
    for member, leaf in enumerate(leaves):
        others = range(member) if member >= num_trees else [each for each in range(num_trees) if each != member]
        known = [leaves[each].total for each in others if leaf.fork is None or _passes(leaves, each, leaf.fork)]
        credit = TurnCredit(advantages=np.zeros(leaf.num_turns), weights=np.zeros(leaf.num_turns))
        first = leaf.fork.num_turns if leaf.fork else 0
        _give(credit, first, above=leaf.total - float(np.mean(known)), weight=1.0)
        credits.append(credit)
    return credits


def _passes(leaves: Sequence[Leaf], member: int, node: Fork) -> bool:
    """Whether a member has the turns before `node`, of which `leaves_of` names the first member that sampled them."""
    while member > node.parent:
        fork = leaves[member].fork
        if fork is None or fork.num_turns < node.num_turns:
            return False
        member = fork.parent
    return member == node.parent


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
