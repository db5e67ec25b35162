"""The advantage among attempts that fork from each other, by hand and against the exact gradient of a small policy."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from slipstream.actors.search.next_fork import CHOICES, Line
from slipstream.common.records.trajectory import Fork
from slipstream.learner.credit.grpo import leave_one_out_advantages
from slipstream.learner.credit.tree import Leaf, TurnCredit, search_advantages, tree_advantages
from slipstream.replay.records.forks import awaited, planned_forks
from tests.replay.records.attempts import ticket
from tests.typecheck import unchecked

Gradient = npt.NDArray[np.float64]  # by the policy's parameters, one for each state
Plan = Mapping[int, Fork]
Estimator = Callable[[Sequence[str], Sequence[Fork | None]], Gradient]

# A policy that goes ("g") or stops ("s") in each of three states, and always stops after the third. An episode is
# the text of its actions; its return belongs to the whole text.
GO = (0.6, 0.3, 0.8)  # probabilities
RETURNS = {"s": 1.0, "gs": 0.2, "ggs": 2.0, "ggg": -1.0}
NUM_TREES, NUM_MEMBERS, MAX_FORK_TURN = 2, 5, 2
PLANS = [
    {2: Fork(parent=0, num_turns=1), 3: Fork(parent=1, num_turns=2), 4: Fork(parent=2, num_turns=2)},
    {2: Fork(parent=0, num_turns=2), 3: Fork(parent=1, num_turns=1), 4: Fork(parent=0, num_turns=1)},
    {2: Fork(parent=0, num_turns=1), 3: Fork(parent=1, num_turns=1), 4: Fork(parent=0, num_turns=1)},
]
SIZES = {"num_members": NUM_MEMBERS, "num_trees": NUM_TREES, "max_fork_turn": MAX_FORK_TURN}
DRAWN = [planned_forks(ticket(group_id, **SIZES)) for group_id in range(6)]


def leaves(*attempts: tuple[float, int, Fork | None]) -> list[Leaf]:
    return [Leaf(total=total, num_turns=num_turns, fork=fork) for total, num_turns, fork in attempts]


def test_a_tree_of_three_levels_of_nodes_is_as_computed_by_hand() -> None:
    """Member 0 is left at turn 1 by members 2 and 3, and at turn 2 by member 4; member 2 at turn 2 by member 5.

    Values: at turn 2 of member 0, (8 + 4) / 2 = 6; at turn 2 of member 2, (1 + 3) / 2 = 2. At turn 1, (6 + 2 + 1) / 3
    = 3. The other tree earned 5.
    """
    attempts = leaves(
        (8.0, 4, None),
        (5.0, 2, None),
        (1.0, 3, Fork(parent=0, num_turns=1)),
        (1.0, 2, Fork(parent=0, num_turns=1)),
        (4.0, 3, Fork(parent=0, num_turns=2)),
        (3.0, 4, Fork(parent=2, num_turns=2)),
    )
    found = tree_advantages(attempts, num_trees=2)
    assert [credit.advantages.round(9).tolist() for credit in found] == [
        [3 - 5, 6 - 1.5, 8 - 4, 8 - 4],
        [5 - 3, 5 - 3],
        [0, 2 - 3.5, 1 - 3],
        [0, 1 - 4],
        [0, 0, 4 - 8],
        [0, 0, 3 - 1, 3 - 1],
    ]
    third, sixth = 1 / 3, 1 / 6
    expected = [[1, third, sixth, sixth], [1, 1], [0, third, sixth], [0, third], [0, 0, sixth], [0, 0, sixth, sixth]]
    for credit, weights in zip(found, expected, strict=True):
        assert np.allclose(credit.weights, weights)


def test_without_forks_it_is_leave_one_out() -> None:
    returns = [3.0, 0.0, 0.0, 1.0]
    found = tree_advantages(leaves(*((total, 2, None) for total in returns)), num_trees=4)
    assert np.allclose([credit.advantages[0] for credit in found], leave_one_out_advantages(returns))
    assert all((credit.weights == 1).all() for credit in found)


def test_a_member_that_should_have_been_a_fork_is_compared_with_all_and_changes_no_other() -> None:
    """Else the number of such members, which depends on the first ones' lengths, would be in the baseline of these."""
    found = tree_advantages(leaves((1.0, 1, None), (0.0, 1, None), (5.0, 1, None)), num_trees=2)
    assert [credit.advantages.tolist() for credit in found] == [[1.0], [-1.0], [4.5]]


@pytest.mark.parametrize("group_id", range(20))
def test_every_turn_is_in_one_member_and_the_weights_of_a_tree_add_up_to_one_at_its_ends(group_id: int) -> None:
    plan = planned_forks(ticket(group_id, num_members=8, num_trees=2, max_fork_turn=5))
    found = tree_advantages(leaves(*((float(member), 6, plan.get(member)) for member in range(8))), num_trees=2)
    assert math.isclose(sum(float(credit.weights[-1]) for credit in found), 2)
    for member, credit in enumerate(found):
        num_shared = plan[member].num_turns if member in plan else 0
        assert (credit.weights[:num_shared] == 0).all()
        assert (credit.weights[num_shared:] > 0).all()
        assert np.all(np.diff(credit.weights[num_shared:]) <= 0)


@pytest.mark.parametrize("group_id", range(20))
def test_forks_are_planned_from_earlier_members_of_a_tree_and_from_turns_of_their_own(group_id: int) -> None:
    plan = planned_forks(ticket(group_id, num_members=9, num_trees=3, max_fork_turn=4))
    assert plan == planned_forks(ticket(group_id, num_members=9, num_trees=3, max_fork_turn=4))
    assert sorted(plan) == list(range(3, 9))
    for member, fork in plan.items():
        assert fork.parent < member
        assert fork.parent % 3 == member % 3
        assert fork.num_turns <= 4
        assert fork.num_turns > (plan[fork.parent].num_turns if fork.parent in plan else 0)


def test_forks_differ_from_group_to_group_and_reach_every_place() -> None:
    plans = [planned_forks(ticket(group_id, num_members=3, num_trees=2, max_fork_turn=4)) for group_id in range(200)]
    counts = [sum(plan[2].num_turns == num_turns for plan in plans) for num_turns in range(1, 5)]
    assert min(counts) > 25  # 50 are expected, with a deviation of 6


@pytest.mark.parametrize("plan", [*PLANS, *DRAWN])
def test_the_mean_over_all_trees_is_the_gradient(plan: Plan) -> None:
    mean, num_starts = mean_over_trees(of_trees, grown(plan))
    assert np.abs(mean / num_starts - policy_gradient()).max() < 1e-10


BIASED: dict[str, Callable[[], tuple[Gradient, float]]] = {
    # Whether a node is left would depend on how long the episode became after it.
    "places among the turns of the finished episode": lambda: mean_over_trees(of_trees, grown_after_the_fact()),
    # GRPO over all leaves: a token is compared with a mean that contains the leaves under it.
    "a baseline with the leaves of the token itself": lambda: mean_over_trees(of_leaves, grown(PLANS[0])),
    # Later turns would count more often than earlier ones, as there are more of them.
    "equal weights of all turns": lambda: mean_over_trees(of_equal_turns, grown(PLANS[0])),
}


@pytest.mark.parametrize("choice", BIASED)
def test_another_choice_biases_the_gradient(choice: str) -> None:
    mean, _ = BIASED[choice]()
    assert off(mean) > 0.01


@pytest.mark.parametrize(("search", "degrees"), [("mcts", 0.5), ("dfsdt", 3.6), ("tree_of_thoughts", 33.2)])
def test_what_a_search_trains_is_the_gradient_of_the_nodes_where_attempts_begin(search: str, degrees: float) -> None:
    mean, _ = mean_over_trees(of_searches, searched(search))
    expected, _ = mean_over_trees(of_nodes, searched(search))
    assert np.abs(mean - expected).max() < 1e-10
    assert (mean / policy_gradient() > 1).all()  # a multiple in each state, as the policy has parameters for each
    assert math.degrees(math.asin(off(mean))) == pytest.approx(degrees, abs=0.05)


@pytest.mark.parametrize(
    ("search", "multiples"),
    [("mcts", [0.675, 0.794, 0.781]), ("dfsdt", [1.076, 1.024, 1.044]), ("tree_of_thoughts", [1.037, 1.034, 1.015])],
)
def test_the_estimator_of_forks_at_random_is_biased_after_a_search(
    search: str, multiples: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The multiples of the gradient that it has as its mean, where success is rare."""
    monkeypatch.setattr(f"{__name__}.GO", (0.5, 0.5, 0.1))
    monkeypatch.setattr(f"{__name__}.RETURNS", {"s": 0.0, "gs": 0.0, "ggs": 0.0, "ggg": 1.0})
    mean, num_starts = mean_over_trees(of_trees, searched(search))
    assert (mean / num_starts / policy_gradient()).round(3).tolist() == multiples


def probability(path: str, *, after: int = 0) -> float:
    chances = [GO[turn] if action == "g" else 1 - GO[turn] for turn, action in enumerate(path)]
    return math.prod(chances[after:])


def score(path: str, turn: int) -> Gradient:
    """The gradient of the log-probability of one action by the logits of "g"."""
    gradient = np.zeros(len(GO))
    gradient[turn] = (path[turn] == "g") - GO[turn]
    return gradient


def policy_gradient(start: str = "") -> Gradient:
    """Of the mean return after `start`, from its definition: the derivative of each path's probability."""
    found = np.zeros(len(GO))
    for chance, path in continued([start], Fork(parent=0, num_turns=len(start)) if start else None):
        found += chance * RETURNS[path] * sum(score(path, turn) for turn in range(len(start), len(path)))
    return found


Grown = Iterator[tuple[float, list[str], list[Fork | None]]]
"""All groups that may be grown: their probability, their paths, and their forks."""


def grown(plan: Plan) -> Grown:
    def more(paths: list[str], forks: list[Fork | None]) -> Grown:
        member = len(paths)
        if member == NUM_MEMBERS:
            yield 1.0, paths, forks
            return
        fork = plan.get(member)
        if fork and (forks[fork.parent] != plan.get(fork.parent) or fork.num_turns >= len(paths[fork.parent])):
            fork = None
        for chance, path in continued(paths, fork):
            for rest, all_paths, all_forks in more([*paths, path], [*forks, fork]):
                yield chance * rest, all_paths, all_forks

    return more([], [])


def grown_after_the_fact() -> Grown:
    """Two attempts, and a third one that leaves the first at one of its turns, drawn evenly when it is over."""
    for first, second in itertools.product(RETURNS, repeat=2):
        places: list[Fork | None] = [Fork(parent=0, num_turns=turn) for turn in range(1, len(first))] or [None]
        for fork in places:
            for chance, third in continued([first, second], fork):
                of_all = probability(first) * probability(second) * chance / len(places)
                yield of_all, [first, second, third], [None, None, fork]


def searched(search: str) -> Grown:
    """The groups that a search grows."""
    before = awaited(ticket(0, **SIZES, search=search))

    def more(lines: list[Line], paths: list[str], forks: list[Fork | None]) -> Grown:
        member = len(paths)
        if member == NUM_MEMBERS:
            yield 1.0, paths, forks
            return
        seen = [lines[each] for each in before.get(member, ())]
        fork = CHOICES[search](seen, MAX_FORK_TURN) if seen else None
        for chance, path in continued(paths, fork):
            begun, steps = fork.num_turns if fork else 0, tuple(action.encode() for action in path)
            line = Line(member=member, begun=begun, steps=steps, total=RETURNS[path], success=RETURNS[path] > 0.9)
            for rest, all_paths, all_forks in more([*lines, line], [*paths, path], [*forks, fork]):
                yield chance * rest, all_paths, all_forks

    return more([], [], [])


def continued(paths: Sequence[str], fork: Fork | None) -> list[tuple[float, str]]:
    start = "" if fork is None else paths[fork.parent][: fork.num_turns]
    return [(probability(path, after=len(start)), path) for path in RETURNS if path.startswith(start)]


def mean_over_trees(estimator: Estimator, groups: Grown) -> tuple[Gradient, float]:
    """The mean of an estimator, and of the number of attempts that begin at the start."""
    mean, num_starts, total = np.zeros(len(GO)), 0.0, 0.0
    with unchecked():  # shapes are checked by the other tests
        for chance, paths, forks in groups:
            mean += chance * estimator(paths, forks)
            num_starts += chance * sum(fork is None for fork in forks)
            total += chance
    assert math.isclose(total, 1)
    return mean, num_starts


def leaves_of(paths: Sequence[str], forks: Sequence[Fork | None]) -> list[Leaf]:
    return leaves(*((RETURNS[path], len(path), fork) for path, fork in zip(paths, forks, strict=True)))


def of_trees(paths: Sequence[str], forks: Sequence[Fork | None]) -> Gradient:
    return weighed(paths, tree_advantages(leaves_of(paths, forks), num_trees=NUM_TREES))


def of_searches(paths: Sequence[str], forks: Sequence[Fork | None]) -> Gradient:
    return weighed(paths, search_advantages(leaves_of(paths, forks), num_trees=NUM_TREES))


def of_nodes(paths: Sequence[str], forks: Sequence[Fork | None]) -> Gradient:
    """The exact gradients of the values of the nodes where attempts begin."""
    return sum((policy_gradient(paths[fork.parent][: fork.num_turns] if fork else "") for fork in forks), np.zeros(3))


def weighed(paths: Sequence[str], credits: Sequence[TurnCredit]) -> Gradient:
    found = np.zeros(len(GO))
    for path, credit in zip(paths, credits, strict=True):
        for turn in range(len(path)):
            found += credit.weights[turn] * credit.advantages[turn] * score(path, turn)
    return found


def of_equal_turns(paths: Sequence[str], forks: Sequence[Fork | None]) -> Gradient:
    found = np.zeros(len(GO))
    credits = tree_advantages(leaves_of(paths, forks), num_trees=NUM_TREES)
    for path, credit in zip(paths, credits, strict=True):
        for turn in np.flatnonzero(credit.weights):
            found += credit.advantages[turn] * score(path, int(turn))
    return found


def of_leaves(paths: Sequence[str], forks: Sequence[Fork | None]) -> Gradient:
    """GRPO without deviations: each attempt trains all of its turns, shared ones too."""
    mean = np.mean([RETURNS[path] for path in paths])
    found = np.zeros(len(GO))
    for path in paths:
        found += (RETURNS[path] - mean) * sum(score(path, turn) for turn in range(len(path)))
    return found


def off(mean: Gradient) -> float:
    """How far a direction is from that of the gradient: the sine of the angle between them."""
    true = policy_gradient()
    cosine = float(mean @ true) / float(np.linalg.norm(mean) * np.linalg.norm(true))
    return math.sqrt(max(0.0, 1 - cosine**2))
