"""Searches over the turns of an episode and over whole episodes, independent of engines and environments.

The result of a search is every episode that finished in its tree, not only the best one.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

EXPLORATION = 1.4  # the constant of PUCT, for returns between 0 and 1


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """A state of an episode. In one tree, the same actions lead to the same state."""

    actions: tuple[str, ...]
    total_reward: float  # the return so far
    mean_logprob: float  # of the tokens of the last action; 0 at the start
    is_over: bool
    success: bool
    value: float | None = None  # probability of success by a process reward model, or return by a critic; None: neither
    share: float = 1.0  # of the actions that were sampled together with its last one: how many were the same


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

    async def revise(self, ends: Sequence[State]) -> State | None:
        """Play one episode from the start to its end, and show it the failed ones that ended in `ends`.

        None if it failed for another reason than the policy.
        """


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


async def graph_of_thoughts(tree: Tree, *, width: int, beam: int, budget: int) -> None:
    """Revise whole episodes: rounds of `width` attempts, each of which is shown the `beam` best ones before.

    Besta et al. 2023, arXiv 2308.09687, where a thought is an attempt: one that is shown a single earlier attempt
    refines it, one that is shown several merges them. A width and a beam of 1 are sequential revision. The best ones
    have the highest value, then the highest return; among equal ones, they are the newest. The search ends with the
    round in which an attempt succeeds, in which all fail for another reason than the policy, or that reaches `budget`
    turns.
    """
    ends: list[State] = []  # the newest first
    while tree.num_turns < budget:
        shown = sorted(ends, key=lambda end: (end.value or 0.0, end.total_reward), reverse=True)[:beam]
        played = await asyncio.gather(*(tree.revise(shown) for _ in range(width)))
        finished = [end for end in played if end is not None]
        if not finished or any(end.success for end in finished):
            return
        ends = [*reversed(finished), *ends]


async def mcts(tree: Tree, *, width: int, budget: int, exploration: float) -> None:
    """Monte Carlo tree search by PUCT, over sampled actions. Silver et al. 2017, doi 10.1038/nature24270.

    On its first visit, a state is played out once by the policy, and the return counts for every state on the path. A
    state with a value is not played out: its value counts instead. On its second visit it is expanded. Finished states
    are not visited again, nor are states whose descendants are all finished. The search ends after `budget` turns, or
    when nothing is left.

    The prior of an action is its share of the actions that were sampled in the state: what remains of the policy's
    probability when the actions are samples of the policy themselves. Hubert et al. 2021, arXiv 2104.06303.
    """
    root = _Node(state=START, parent=None)
    while not root.is_closed and tree.num_turns < budget:
        node = root
        while node.children:
            node = node.best_child(exploration)
        if node.visits or node is root:
            children = await tree.expand(node.state, width=min(width, budget - tree.num_turns))
            node.children = [_Node(state=child, parent=node) for child in children]
        await _visit(tree, node.best_child(exploration) if node.children else node, budget=budget)


def puct(value: float, *, share: float, visits: int, parent_visits: int, exploration: float) -> float:
    """The score of a child: Q + c P sqrt(N) / (1 + n), with the prior P of its action.

    Value 0.5, share 0.6, n = 2 visits of N = 9, c = 1.4: 0.5 + 1.4 * 0.6 * 3 / 3 = 1.34. An N of 0 counts as 1, so that
    the prior decides the first visit.
    """
    return value + exploration * share * math.sqrt(max(1, parent_visits)) / (1 + visits)


@dataclass(kw_only=True, slots=True, eq=False)
class _Node:
    """A state in the tree of `mcts`, with its statistics."""

    state: State
    parent: "_Node | None"
    children: list["_Node"] = field(default_factory=list)
    visits: int = 0
    returns: float = 0.0  # the sum over its visits
    is_closed: bool = False  # nothing is left to play here

    @property
    def mean_return(self) -> float:
        """Over its visits; before the first one that of its parent, so that the sign of returns does not matter."""
        if self.visits or self.parent is None:
            return self.returns / max(1, self.visits)
        return self.parent.mean_return

    def best_child(self, exploration: float) -> "_Node":
        """The open child with the highest score; among equal ones, the first."""

        def score(child: "_Node") -> float:
            return puct(
                child.mean_return,
                share=child.state.share,
                visits=child.visits,
                parent_visits=self.visits,
                exploration=exploration,
            )

        return max((child for child in self.children if not child.is_closed), key=score)


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
