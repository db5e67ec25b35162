"""Three search algorithms over the turns of an episode, independent of engines and environments.

The result of a search is every episode that finished in its tree, not only the best one.
"""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """A state of an episode. In one tree, the same actions lead to the same state."""

    actions: tuple[str, ...]
    total_reward: float  # the return so far
    mean_logprob: float  # of the tokens of the last action; 0 at the start
    is_over: bool
    success: bool
    value: float | None = None  # the probability of success from here, by a process reward model; None without one


START = State(actions=(), total_reward=0.0, mean_logprob=0.0, is_over=False, success=False)


class Tree(Protocol):
    """The states of one task that were reached by playing."""

    @property
    def num_turns(self) -> int:
        """How many turns were generated so far, including failed ones."""

    async def expand(self, state: State, *, width: int) -> list[State]:
        """Sample `width` actions in `state`, one turn each; return the resulting states that are new to the tree."""

    async def play_out(self, state: State, *, max_turns: int) -> State | None:
        """Play one episode from `state` to its end, or for `max_turns`; None if it failed."""


async def tree_of_thoughts(tree: Tree, *, width: int, beam: int) -> None:
    """Search breadth first: of all states at one depth, expand the `beam` best. Yao et al. 2023, arXiv 2305.10601.

    The best states have the highest value; without values, the highest return so far; among equal ones, the most likely
    last action. Finished episodes do not count towards the `beam`. The search ends when no state is left.
    """
    states = [START]
    while states:
        expanded = await asyncio.gather(*(tree.expand(state, width=width) for state in states))
        running = [child for children in expanded for child in children if not child.is_over]
        states = sorted(running, key=_worth, reverse=True)[:beam]


def _worth(state: State) -> tuple[float, float, float]:
    return state.value or 0.0, state.total_reward, state.mean_logprob


async def dfsdt(tree: Tree, *, width: int, budget: int) -> None:
    """Search depth first with backtracking: expand the newest state. Qin et al. 2023 (ToolLLM), arXiv 2307.16789.

    It goes back by one state after `width` actions in a state. It goes back by two after an episode that ended without
    success, as in the authors' code, but never past the start. The search ends with the first success, after `budget`
    turns, or when nothing is left to try.
    """
    path, tries = [START], [0]
    while path and tree.num_turns < budget:
        if tries[-1] == width:
            path.pop()
            tries.pop()
            continue
        tries[-1] += 1
        for child in await tree.expand(path[-1], width=1):
            if not child.is_over:
                path.append(child)
                tries.append(0)
            elif child.success:
                return
            elif len(path) > 1:
                path.pop()
                tries.pop()


async def mcts(tree: Tree, *, width: int, budget: int, exploration: float) -> None:
    """Monte Carlo tree search by UCB1. Kocsis & Szepesvari 2006 (UCT); for agents Zhou et al. 2023, arXiv 2310.04406.

    On its first visit, a state is played out once by the policy, and the return counts for every state on the path. A
    state with a value is not played out: its value counts instead. On its second visit it is expanded. Finished states
    are not visited again, nor are states whose descendants are all finished. The search ends after `budget` turns, or
    when nothing is left.
    """
    root = _Node(state=START, parent=None)
    while not root.is_closed and tree.num_turns < budget:
        node = _selected(root, exploration)
        if node.visits or node is root:
            children = await tree.expand(node.state, width=min(width, budget - tree.num_turns))
            node.children = [_Node(state=child, parent=node) for child in children]
        await _visit(tree, node.children[0] if node.children else node, budget=budget)


def ucb1(mean_return: float, *, visits: int, parent_visits: int, exploration: float) -> float:
    """The UCB1 score of a child: mean + c sqrt(ln N / n), infinite before the first visit. Auer et al. 2002.

    Mean 0.5 of n = 2 visits of N = 10 with c = 1.4: 0.5 + 1.4 * sqrt(2.302585 / 2) = 2.002176.
    """
    if not visits:
        return math.inf
    return mean_return + exploration * math.sqrt(math.log(parent_visits) / visits)


@dataclass(kw_only=True, slots=True, eq=False)
class _Node:
    """A state in the tree of `mcts`, with its statistics."""

    state: State
    parent: "_Node | None"
    children: list["_Node"] = field(default_factory=list)
    visits: int = 0
    returns: float = 0.0  # the sum over its visits
    is_closed: bool = False  # nothing is left to play here

    def bound(self, parent_visits: int, exploration: float) -> float:
        mean_return = self.returns / max(1, self.visits)
        return ucb1(mean_return, visits=self.visits, parent_visits=parent_visits, exploration=exploration)


def _selected(root: _Node, exploration: float) -> _Node:
    """Walk down from `root` to the open child with the highest score; among equal ones, the first."""
    node = root
    while node.children:
        open_children = [child for child in node.children if not child.is_closed]
        node = max(open_children, key=lambda child: child.bound(node.visits, exploration))
    return node


async def _visit(tree: Tree, node: _Node, *, budget: int) -> None:
    """Play `node` out and count the return on the way up; close the node if there is nothing to play."""
    if node.state.is_over:
        _count(node, node.state.total_reward)
        _close(node)
    elif node.visits or node.parent is None:  # its expansion gave no new states
        _close(node)
    elif node.state.value is not None:
        _count(node, node.state.value)
    elif tree.num_turns < budget:
        end = await tree.play_out(node.state, max_turns=budget - tree.num_turns)
        if end is None:
            _close(node)
        else:
            _count(node, end.total_reward)


def _count(node: _Node | None, total_reward: float) -> None:
    while node is not None:
        node.visits += 1
        node.returns += total_reward
        node = node.parent


def _close(node: _Node) -> None:
    """Close `node`, and every state above that has no open child left."""
    node.is_closed = True
    if node.parent is not None and all(sibling.is_closed for sibling in node.parent.children):
        _close(node.parent)
