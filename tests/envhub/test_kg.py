"""The tools of `kg`, on a graph that is small enough to check by eye."""

import random

import pytest

from slipstream.envhub.kg.graph import ATTRIBUTES, Graph, draw_graph
from slipstream.envhub.kg.graph_question import Call, Question
from slipstream.envhub.kg.kg import KgState, KgWorld, f1
from tests.envhub.env_cases import act

GRAPH = Graph(
    kinds={"ada": "person", "ben": "person", "cleo": "person", "dover": "town", "elgin": "town", "kelso": "town"},
    edges={
        "ada": {"friend": ("ben", "cleo"), "home": ("dover",)},
        "ben": {"friend": ("ada",), "home": ("elgin",)},
        "cleo": {"home": ("elgin",)},
        "dover": {"resident": ("ada",)},
        "elgin": {"resident": ("ben", "cleo")},
        "kelso": {},
    },
    numbers={"ada": 30, "ben": 50, "cleo": 20, "dover": 70, "elgin": 60, "kelso": 5},
)
QUESTION = Question(
    text="friend of ada with most age",
    starts=("ada",),
    program=(
        Call(tool="get_neighbors", arguments=("ada", "friend"), gives=("ben", "cleo")),
        Call(tool="argmax", arguments=(0, "age"), gives=("ben",)),
    ),
)
WORLD = KgWorld(opening="", graph=GRAPH, question=QUESTION)


def answers(*actions: str) -> list[str]:
    state, texts = WORLD.first, []
    for action in actions:
        change = act(WORLD, action, state)
        state = change.state
        texts.append(change.text if change.valid else f"refused: {change.text}")
    return texts


def test_each_tool_returns_what_is_in_the_graph() -> None:
    said = {
        "get_relations(ada)": "friend home",
        "get_neighbors(ada, friend)": "#1 person",
        "get_relations(#1)": "friend home",
        "get_neighbors(#1, home)": "#2 town",
        "get_neighbors(elgin, resident)": "#1 person",
        "intersection(#1, #2)": "nothing",
        "get_attributes(#1)": "age",
        "argmax(#1, age)": "#3 person",
        "argmin(#1, age)": "#4 person",
        "count(#1)": "#5 number",
    }
    assert answers(*said) == list(said.values())
    assert answers("get_relations(kelso)") == ["none"]


@pytest.mark.parametrize(
    "action",
    [
        *("get_relations()", "get_relations(zeno)", "get_relations(ada", "intersection(ada, #1)", "argmax(ada, age)"),
        *("get_neighbors(ada)", "get_neighbors(ada, employer)", "get_neighbors(#1, home)", "count(#-1)"),
        *("answer(ada)", "answer(#0)", "answer(#1)", "answer(#1, #2)"),
    ],
)
def test_a_call_with_an_unknown_argument_is_refused(action: str) -> None:
    assert answers(action)[0].startswith("refused: no ")


def test_a_number_is_not_a_set_of_entities() -> None:
    counted = ("get_neighbors(ada, friend)", "count(#1)")
    calls = ("get_relations(#2)", "get_neighbors(#2, home)", "count(#2)", "argmax(#2, age)", "get_attributes(#2)")
    for action in calls:
        assert answers(*counted, action)[2].startswith("refused: ")
    assert answers(*counted, "argmax(#1, price)")[2] == "refused: no attribute price there"


def test_an_answer_earns_its_f1() -> None:
    def score(action: str) -> float:
        state = KgState(found=(("ben",), ("ben", "cleo"), ("cleo",)))
        return act(WORLD, action, state).score

    assert [score("answer(#1)"), score("answer(#2)"), score("answer(#3)")] == [1.0, pytest.approx(2 / 3), 0.0]
    assert f1(("a", "b"), ("b", "c", "d")) == pytest.approx(2 / 5)


def test_inverse_relations_lead_back_and_numbers_are_all_different() -> None:
    graph = draw_graph(random.Random(1))
    for person in (entity for entity, kind in graph.kinds.items() if kind == "person"):
        (home,) = graph.edges[person]["home"]
        assert person in graph.edges[home]["resident"]
    assert len(set(graph.numbers.values())) == len(graph.kinds)
    assert set(graph.kinds.values()) == set(ATTRIBUTES)
