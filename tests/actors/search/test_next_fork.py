"""Where a search of a run lets the next attempt leave, by scores that were computed by hand."""

from collections.abc import Sequence

import pytest

from slipstream.actors.search.next_fork import CHOICES, Line
from slipstream.common.config.replay_config import SEARCHES
from slipstream.common.records.trajectory import Fork


def line(member: int, path: str, total: float, *, begun: int = 0, success: bool = False) -> Line:
    """An attempt whose turns are the letters of `path`; the first `begun` of them it has from another."""
    steps = tuple(letter.encode() for letter in path)
    return Line(member=member, begun=begun, steps=steps, total=total, success=success)


def at(parent: int, num_turns: int) -> Fork:
    return Fork(parent=parent, num_turns=num_turns)


ONE, TWO = line(0, "abcd", 1.0), line(1, "wxyz", 0.0)


@pytest.mark.parametrize(
    ("search", "lines", "max_turns", "expected"),
    [
        # A new child 1 + 1.4 / 2 = 1.7, the only one 1.35.
        ("mcts", [ONE], 9, None),
        # At the start a new one 0.5 + 1.4 / 3 * 2 ** 0.5 = 1.16, a 1.33, w 0.33; after a, a new one 1.7, b 1.35.
        ("mcts", [ONE, TWO], 9, at(0, 1)),
        # All earn the same: a new one 0 + 0.66, the others 0.33.
        ("mcts", [line(0, "abcd", 0.0), TWO], 9, None),
        # The best is over after its first turn, so nothing can leave it: 1.16 beats the 0.33 of w.
        ("mcts", [line(0, "a", 1.0), TWO], 9, None),
        # Of three actions at the start two were a: it scores 1 + 0.7 * 3 ** 0.5 / 3 = 1.40, a new one 1.27.
        ("mcts", [ONE, TWO, line(2, "aefg", 1.0)], 9, at(0, 1)),
        # The third has its a from the first: of two actions one was. A new one 2/3 + 1.4 / 3 * 3 ** 0.5 = 1.48.
        ("mcts", [ONE, TWO, line(2, "aefg", 1.0, begun=1)], 9, None),
        # a 1 + 0.7 / 3 = 1.23, a new one 0.5 + 0.7 = 1.2; after a, b 2 + 0.33, a new one 1.66; after b, 2.7 and 2.35.
        ("mcts", [line(0, "abcd", 2.0), TWO, line(2, "stuv", 0.0), line(3, "aefg", 0.0, begun=1)], 9, at(0, 2)),
        ("mcts", [line(0, "abcd", 2.0), TWO, line(2, "stuv", 0.0), line(3, "aefg", 0.0, begun=1)], 1, at(0, 1)),
        ("dfsdt", [TWO, ONE], 9, at(0, 2)),
        ("dfsdt", [TWO, ONE], 1, at(0, 1)),
        ("dfsdt", [ONE, line(1, "ab", 0.0)], 9, None),  # two states back is the start
        ("dfsdt", [line(0, "abcd", 1.0, success=True)], 9, None),  # a new search
        ("dfsdt", [line(0, "abcd", 0.0), line(1, "abef", 0.0, begun=2)], 9, at(0, 2)),
        # Three actions were tried after ab.
        ("dfsdt", [line(0, "abcd", 0.0), line(1, "abef", 0.0, begun=2), line(2, "abgh", 0.0, begun=2)], 9, at(0, 1)),
        ("tree_of_thoughts", [TWO], 9, at(1, 1)),
        ("tree_of_thoughts", [TWO, ONE], 9, at(0, 1)),
        ("tree_of_thoughts", [TWO, ONE, line(2, "aefg", 0.0, begun=1)], 9, at(0, 2)),
        # w is worth 0.6, and a (1 + 0) / 2.
        ("tree_of_thoughts", [ONE, line(1, "wxyz", 0.6), line(2, "aefg", 0.0, begun=1)], 1, at(1, 1)),
        # No attempt has a turn after four.
        ("tree_of_thoughts", [TWO, line(1, "abcd", 1.0, begun=3)], 9, at(1, 1)),
        ("tree_of_thoughts", [line(0, "a", 1.0), line(1, "w", 0.0)], 9, None),
    ],
)
def test_the_next_attempt_leaves_where_the_search_says(
    search: str, lines: Sequence[Line], max_turns: int, expected: Fork | None
) -> None:
    assert CHOICES[search](lines, max_turns) == expected


def test_every_search_that_can_be_set_has_its_choice() -> None:
    assert tuple(CHOICES) == SEARCHES
