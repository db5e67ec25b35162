"""The searches on trees made by hand: what they expand in which order, what they spend, and where they end."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from slipstream.actors.search.tree_search import State, dfsdt, graph_of_thoughts, mcts, puct, tree_of_thoughts


class HandMade:
    """A tree whose actions are letters, so that "ab" is where a and then b lead.

    `samples` has the actions sampled in a state, repeated in that order; `endings` the rest of an episode from a state;
    `ends` the final states, and whether they succeed; `rewards` the reward of the last action before a state. The
    default reward is 0, the default log-probability -1. A sample of "!" failed. `attempts` are the whole episodes of
    revisions, in that order.
    """

    def __init__(
        self,
        samples: dict[str, str],
        *,
        ends: dict[str, bool],
        rewards: dict[str, float] | None = None,
        logprobs: dict[str, float] | None = None,
        endings: dict[str, list[str]] | None = None,
        values: dict[str, float] | None = None,
        attempts: Sequence[str] = (),
    ) -> None:
        self._samples = {state: itertools.cycle(letters) for state, letters in samples.items()}
        self._endings = {state: itertools.cycle(paths) for state, paths in (endings or {}).items()}
        self._ends, self._rewards, self._logprobs = ends, rewards or {}, logprobs or {}
        self._values, self._attempts = values or {}, iter(attempts)
        self._reached: set[str] = set()
        self.num_turns = 0
        self.done: list[str] = []  # "aa" an expansion there, "aa>b" an episode from there to "aab", "a+b: c" a revision

    async def expand(self, state: State, *, width: int) -> list[State]:
        at = "".join(state.actions)
        self.done.append(at)
        self.num_turns += width
        sampled = [at + next(self._samples[at]) for _ in range(width)]
        counts = Counter(path for path in sampled if not path.endswith("!"))
        new = [path for path in counts if path not in self._reached]
        self._reached.update(new)
        return [replace(self._state(path), share=counts[path] / counts.total()) for path in new]

    async def play_out(self, state: State, *, max_turns: int) -> State | None:
        at = "".join(state.actions)
        rest = next(self._endings[at])[:max_turns]
        self.done.append(f"{at}>{rest}")
        self.num_turns += len(rest)
        return None if rest.endswith("!") else self._state(at + rest)

    async def revise(self, ends: Sequence[State]) -> State | None:
        path = next(self._attempts)
        self.done.append(f"{'+'.join(''.join(end.actions) for end in ends)}: {path}")
        self.num_turns += len(path)
        return None if path.endswith("!") else self._state(path)

    def _state(self, path: str) -> State:
        return State(
            actions=tuple(path),
            total_reward=sum(self._rewards.get(path[:stop], 0.0) for stop in range(1, len(path) + 1)),
            mean_logprob=self._logprobs.get(path, -1.0),
            is_over=path in self._ends,
            success=self._ends.get(path, False),
            value=self._values.get(path),
        )


def searched(tree: HandMade, search: Coroutine[Any, Any, None]) -> list[str]:
    asyncio.run(search)
    return tree.done


def test_tree_of_thoughts_goes_on_from_the_best_at_each_depth_and_breaks_ties_by_the_last_action() -> None:
    tree = HandMade(
        {"": "abc", "b": "abc", "c": "abc", "bb": "abc", "ca": "abc"},
        rewards={"b": 0.5, "ba": 0.1, "ca": 0.7, "cb": 0.3},
        logprobs={"a": -0.9, "c": -0.2, "bb": -0.1, "bc": -0.3},
        ends={"ba": False, "cc": True} | {f"{at}{letter}": False for at in ("bb", "ca") for letter in "abc"},
    )
    # b has earned 0.5; c and a nothing, and c is likelier. Then ba (0.6) is over, and the best are ca (0.7) and bb: it
    # has 0.5 as bc has, and is likelier. cc is a success and takes no place.
    assert searched(tree, tree_of_thoughts(tree, width=3, beam=2)) == ["", "b", "c", "ca", "bb"]
    assert tree.num_turns == 15


def test_tree_of_thoughts_goes_on_from_the_most_valuable_state_whatever_it_has_earned() -> None:
    samples, ends = {"": "abc", "a": "xy", "c": "xy"}, {f"{at}{letter}": False for at in "ac" for letter in "xy"}
    tree = HandMade(samples, rewards={"b": 0.5}, values={"a": 0.3, "b": 0.2, "c": 0.9}, ends=ends)
    assert searched(tree, tree_of_thoughts(tree, width=3, beam=2)) == ["", "c", "a"]


def test_mcts_counts_a_value_in_the_place_of_an_episode() -> None:
    samples, ends = {"": "ab", "a": "xy", "b": "xy"}, {f"{at}{letter}": False for at in "ab" for letter in "xy"}
    tree = HandMade(samples, values={"a": 0.1, "b": 0.9}, ends=ends)
    # a and b are visited without an episode; then b, with the higher value, is expanded before a.
    assert searched(tree, mcts(tree, width=2, budget=6, exploration=0.1))[:2] == ["", "b"]
    assert not any(">" in step for step in tree.done)


def test_tree_of_thoughts_counts_an_action_once_lives_with_one_that_failed_and_keeps_the_order_of_equals() -> None:
    tree = HandMade({"": "aa!", "a": "!!!"}, ends={})
    assert searched(tree, tree_of_thoughts(tree, width=3, beam=2)) == ["", "a"]
    assert tree.num_turns == 6
    tree = HandMade({"": "abc", "a": "x", "b": "x"}, ends={"ax": True, "bx": True})
    assert searched(tree, tree_of_thoughts(tree, width=3, beam=2)) == ["", "a", "b"]


def test_dfsdt_goes_deep_goes_back_and_stops_at_the_first_success() -> None:
    samples = {"": "abc", "a": "ab", "aa": "ab", "ab": "ab", "b": "ab", "ba": "b"}
    tree = HandMade(samples, ends={"aaa": False, "aba": False, "bab": True})
    # aaa is over and sends it past aa, whose b is not tried, and aba past ab; in a, both are tried then.
    assert searched(tree, dfsdt(tree, width=2, budget=60)) == ["", "a", "aa", "a", "ab", "", "b", "ba"]
    assert tree.num_turns == 8


@pytest.mark.parametrize(
    ("samples", "ends", "width", "budget", "done"),
    [
        ({"": "ab", "a": "a"}, {"aa": False, "b": False}, 2, 60, ["", "a", ""]),
        ({"": "abc"}, {"a": False, "b": False, "c": False}, 3, 60, ["", "", ""]),
        ({"": "aab", "a": "aa", "aa": "!!"}, {}, 2, 60, ["", "a", "aa", "aa", "a", ""]),
        ({"": "a", "a": "a", "aa": "a", "aaa": "a"}, {"aaaa": True}, 2, 3, ["", "a", "aa"]),
    ],
    ids=["all is tried", "all is tried at once", "an action again is one of the width", "its budget is spent"],
)
def test_dfsdt_ends_without_a_success(
    samples: dict[str, str], ends: dict[str, bool], width: int, budget: int, done: list[str]
) -> None:
    tree = HandMade(samples, ends=ends)
    assert searched(tree, dfsdt(tree, width=width, budget=budget)) == done


def test_a_success_that_is_not_the_end_does_not_stop_dfsdt() -> None:
    tree = HandMade({"": "a", "a": "a"}, ends={"aa": True})
    tree._state = lambda path: State(  # type: ignore[method-assign]
        actions=tuple(path), total_reward=0.0, mean_logprob=0.0, is_over=len(path) == 2, success=True
    )
    assert searched(tree, dfsdt(tree, width=1, budget=9)) == ["", "a"]


def test_puct_is_what_silver_et_al_say() -> None:
    assert puct(0.5, share=0.6, visits=2, parent_visits=9, exploration=1.4) == pytest.approx(1.34)
    assert puct(0.25, share=1.0, visits=0, parent_visits=4, exploration=1.0) == pytest.approx(2.25)
    assert puct(0.75, share=0.5, visits=3, parent_visits=9, exploration=0.0) == 0.75
    assert puct(0.0, share=0.2, visits=0, parent_visits=0, exploration=1.0) == pytest.approx(0.2)


def test_mcts_visits_first_what_the_policy_does_most_often() -> None:
    tree = HandMade({"": "baa"}, ends={}, endings={"a": ["x"], "b": ["x"]})
    assert searched(tree, mcts(tree, width=3, budget=4, exploration=1.4)) == ["", "a>x"]


def test_mcts_plays_out_each_child_once_before_it_looks_deeper_and_ends_where_all_is_over() -> None:
    samples, endings = {"": "ab", "a": "ab", "b": "ab"}, {"a": ["b"], "b": ["a"]}
    ends = {"aa": True, "ab": False, "ba": False, "bb": False}
    tree = HandMade(samples, ends=ends, rewards={"aa": 1.0}, endings=endings)
    # Both have earned 0 in one visit: a comes first. aa brings 1, so a has 0.5 + 0.7 sqrt(3) / 3 = 0.904 against
    # 0.7 sqrt(3) / 2 = 0.606 of b, and ab is seen; then a is closed, and what is left is b.
    assert searched(tree, mcts(tree, width=2, budget=60, exploration=1.4)) == ["", "a>b", "b>a", "a", "b"]
    assert tree.num_turns == 8


DEEP = {
    "samples": {"": "ab", "a": "ab", "b": "ab", "aa": "ab", "ab": "ab", "ba": "ab", "bb": "ab"},
    "endings": {"a": ["aa"], "b": ["aa"], "aa": ["a"], "ab": ["a"], "ba": ["a"], "bb": ["a"]},
    "rewards": {"baa": 0.5, "bba": 0.5},
    "ends": {"".join(path): False for path in itertools.product("ab", repeat=3)},
}


@pytest.mark.parametrize(
    ("exploration", "then"),
    [
        # a has earned 0 and b 0.5, so the rest is below b: ba, then bb, which was visited less, then ba again.
        (1.0, ["bb>a", "ba"]),
        # After a, b and ba: b has 0.5 + 5 sqrt(3) / 3 = 3.387, and a 5 sqrt(3) / 2 = 4.330.
        (10.0, ["a", "aa>a"]),
    ],
)
def test_mcts_stays_where_it_has_earned_or_explores(exploration: float, then: list[str]) -> None:
    tree = HandMade(**DEEP)  # type: ignore[arg-type]
    done = searched(tree, mcts(tree, width=2, budget=12, exploration=exploration))
    assert done == ["", "a>aa", "b>aa", "b", "ba>a", *then]
    assert tree.num_turns == 12


def test_mcts_does_the_same_when_every_end_earns_less() -> None:
    def done(less: float) -> list[str]:
        paths = map("".join, itertools.product("ab", repeat=3))
        rewards = {path: (0.5 if path in ("baa", "bba") else 0.0) - less for path in paths}
        tree = HandMade(**DEEP | {"rewards": rewards})  # type: ignore[arg-type]
        return searched(tree, mcts(tree, width=2, budget=14, exploration=0.5))

    assert done(0.0) == done(4.0)


@pytest.mark.parametrize("budget", range(1, 15))
def test_mcts_spends_its_budget_to_the_turn(budget: int) -> None:
    tree = HandMade(**DEEP)  # type: ignore[arg-type]
    searched(tree, mcts(tree, width=2, budget=budget, exploration=1.4))
    assert tree.num_turns == budget


def test_mcts_gives_up_where_everything_fails_or_nothing_is_new() -> None:
    for samples, endings, done in (
        ({"": "!!"}, {}, [""]),
        ({"": "ab", "a": "!!"}, {"a": ["b!"], "b": ["!"]}, ["", "a>b!", "b>!"]),
        ({"": "a", "a": "!"}, {"a": ["x"]}, ["", "a>x", "a"]),
    ):
        tree = HandMade(samples, ends={}, endings=endings)
        assert searched(tree, mcts(tree, width=2, budget=60, exploration=1.4)) == done


def test_a_revision_is_shown_the_best_attempt_before_and_the_newest_of_equal_ones() -> None:
    ends = {"aa": False, "ab": False, "ba": False, "bb": False, "cc": True}
    tree = HandMade({}, attempts=list(ends), rewards={"ba": 0.5}, ends=ends)
    done = searched(tree, graph_of_thoughts(tree, width=1, beam=1, budget=60))
    assert done == [": aa", "aa: ab", "ab: ba", "ba: bb", "ba: cc"]


def test_attempts_of_one_round_are_shown_the_same_ones_and_merge_them() -> None:
    values, ends = {"a": 0.1, "b": 0.3, "c": 0.2, "d": 0.9}, dict.fromkeys("abcdef", False)
    tree = HandMade({}, attempts=list(ends), values=values, ends=ends)
    done = searched(tree, graph_of_thoughts(tree, width=2, beam=2, budget=5))
    assert done == [": a", ": b", "b+a: c", "b+a: d", "d+b: e", "d+b: f"]
    assert tree.num_turns == 6  # the round that reaches the budget is played to its end


def test_revision_ends_where_a_round_fails_for_another_reason_than_the_policy() -> None:
    tree = HandMade({}, attempts=["a", "b!", "c!", "d"], ends={"a": False, "d": True})
    assert searched(tree, graph_of_thoughts(tree, width=2, beam=1, budget=60)) == [": a", ": b!", "a: c!", "a: d"]
    tree = HandMade({}, attempts=["a!", "b!"], ends={})
    assert searched(tree, graph_of_thoughts(tree, width=2, beam=1, budget=60)) == [": a!", ": b!"]
