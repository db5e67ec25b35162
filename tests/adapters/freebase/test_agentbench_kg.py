"""AgentBench's questions over a small Freebase, behind a real SPARQL engine (rdflib): `make test-adapters` runs it."""

import json
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rdflib

from slipstream.envhub.catalogue import make_env
from tests.adapters.held import USUAL, acted, keeps
from tests.envhub import test_env_contract as contract
from tests.envhub.env_cases import Case, said
from tests.http_stand_in import Asked, HttpStandIn, Reply

NS = "http://rdf.freebase.com/ns/"
MAKES, USED_IN = "computer.maker.makes", "computer.processor.used_in"
DESIGNER, YEAR = "computer.computer.designer", "computer.computer.year"
TRIPLES = [
    *(("m.apple", MAKES, "m.mac1"), ("m.apple", MAKES, "m.mac2"), ("m.apple", MAKES, "m.mac3")),
    *(("m.68040", USED_IN, "m.mac2"), ("m.68040", USED_IN, "m.mac3"), ("m.68040", USED_IN, "m.next")),
    *(("m.mac2", DESIGNER, "m.ann"), ("m.mac3", DESIGNER, "m.bob")),
    *(("m.mac1", YEAR, 1984), ("m.mac2", YEAR, 1990), ("m.mac3", YEAR, 1993)),
    ("m.apple", "type.object.secret", "m.not_in_the_ontology"),
]
MACS, USES = f"get_neighbors(m.apple,{MAKES})", f"get_neighbors(m.68040,{USED_IN})"
ANN = {"answer_type": "Entity", "answer_argument": "m.ann", "entity_name": "Ann"}
BOB = {"answer_type": "Entity", "answer_argument": "m.bob", "entity_name": "Bob"}
QUESTIONS: list[dict[str, Any]] = [  # as in std.json
    {
        "question": "how many mac models used motorola 68040 processors?",
        "entities": {"mac": "m.apple", "Motorola 68040": "m.68040"},
        "actions": ["get_relations(m.apple)", MACS, "get_relations(m.68040)", USES, "intersection(#0,#1)", "count(#2)"],
        "answer": [{"answer_type": "Value", "answer_argument": "2"}],
    },
    {
        "question": "who designed them?",
        "entities": {"mac": "m.apple", "Motorola 68040": "m.68040"},
        "actions": [MACS, USES, "intersection(#0,#1)", f"get_neighbors(#2,{DESIGNER})"],
        "answer": [ANN, BOB],
    },
    {
        "question": "who designed the latest?",
        "qid": "3_grailqa",
        "source": "grailqa",
        "s_expression": "(ARGMAX ...)",
        "entities": {"mac": "m.apple"},
        "actions": [MACS, "get_attributes(#0)", f"argmax(#0,{YEAR})", f"get_neighbors(#1,{DESIGNER})"],
        "answer": [BOB],
    },
]
CHECKS = [*USUAL, contract.test_the_expert_solves_its_tasks]


@pytest.fixture(scope="module")
def sparql_url() -> Iterator[str]:
    graph = rdflib.Graph()
    for start, relation, end in TRIPLES:
        last = rdflib.URIRef(NS + end) if isinstance(end, str) else rdflib.Literal(end)
        graph.add((rdflib.URIRef(NS + start), rdflib.URIRef(NS + relation), last))

    def answer(asked: Asked) -> Reply:
        form = urllib.parse.parse_qs(asked.body.decode())
        return 200, {}, graph.query(form["query"][0]).serialize(format="json") or b""

    with HttpStandIn(answer) as server:
        yield f"{server.url}/sparql"


@pytest.fixture
def options(sparql_url: str, tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "std.json"
    path.write_text(json.dumps(QUESTIONS))
    vocabulary = {"relations": [MAKES, USED_IN, DESIGNER], "attributes": [YEAR], "classes": []}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "fb_roles").write_text(
        f"computer.maker {MAKES} computer.computer\ncomputer.processor {USED_IN} computer.computer\n"
        f"computer.computer {DESIGNER} people.person\n"
    )
    return {"train": str(path), "held_out": str(path), "ontology": str(tmp_path), "sparql_url": sparql_url}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_agentbench_kg_keeps_the_contract(check: Callable[..., None], options: dict[str, str]) -> None:
    keeps(check, Case("agentbench_kg", 10, 0, options, share=0.03, samples=("get_relations(m.apple)",)))


def test_tools_tell_kinds_and_what_agentbench_lets_be_used(options: dict[str, str]) -> None:
    calls = [
        ("get_relations(m.apple)", MAKES),
        (f"get_neighbors(m.apple, {MAKES})", "#0 computer.computer"),
        ("get_attributes(#0)", YEAR),
        (f"argmin(#0, {YEAR})", "#1 computer.computer"),
        ("get_relations(#1)", "none"),
        ("count(#0)", "#2 type.int"),
        (f"get_neighbors(m.apple, {MAKES})", "#0 computer.computer"),
    ]
    opening, *observations = acted("agentbench_kg", options, 2, [action for action, _ in calls])
    assert said(opening) == "who designed the latest?\nEntities: mac: m.apple"
    assert list(map(said, observations)) == [answer for _, answer in calls]


def test_the_score_is_f1_over_the_entities(options: dict[str, str]) -> None:
    ways = {
        (MACS, f"get_neighbors(#0, {DESIGNER})"): 1.0,
        (MACS, f"argmax(#0, {YEAR})", f"get_neighbors(#1, {DESIGNER})"): 2 / 3,
        (MACS,): 0.0,
    }
    for way, score in ways.items():
        end = acted("agentbench_kg", options, 1, [*way, f"answer(#{len(way) - 1})"])[-1]
        assert (end.terminated, end.score) == (True, pytest.approx(score)), way
    counted = [*QUESTIONS[0]["actions"], "answer(#3)"]
    assert acted("agentbench_kg", options, 0, counted)[-1].score == 1.0


@pytest.mark.parametrize(
    "action",
    [
        *("get_neighbors(m.apple, type.object.secret)", f"get_neighbors(m.nothing, {MAKES})", "count(m.apple)"),
        *("intersection(#0, #9)", "intersection(#0, #1)", "get_relations(m.x } UNION { ?x ?r ?o)", "answer(m.apple)"),
        *("get_relations(http://example.com)", f"argmax(#0, {MAKES})", "get_relations(#1)", "count(#1)", "answer(#-1)"),
    ],
)
def test_what_makes_no_sense_is_refused_or_gives_nothing(options: dict[str, str], action: str) -> None:
    observation = acted("agentbench_kg", options, 0, [MACS, "count(#0)", action])[-1]
    assert not observation.done
    assert not observation.valid_action or said(observation) == "nothing"


def test_a_program_does_not_grow_without_end(options: dict[str, str]) -> None:
    grown = [MACS, USES, *(f"intersection(#{number}, #{number + 1})" for number in range(12))]
    observations = acted("agentbench_kg", options, 0, grown)[1:]
    assert [o.valid_action for o in observations].index(False) == 8  # by then a program would have 109 calls


def test_what_is_missing_is_said_with_what_to_fetch(options: dict[str, str], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for changed, why in (
        ({"sparql_url": ""}, "must be the URL of a SPARQL endpoint with Freebase"),
        ({"train": "", "held_out": ""}, "get data/knowledgegraph/std.json"),
        ({"ontology": ""}, "get src/server/tasks/knowledgegraph/ontology"),
        ({"ontology": str(empty)}, "vocab.json does not exist; get src/server"),
    ):
        with pytest.raises(ValueError, match=why):
            make_env("agentbench_kg", options | changed), keeps
