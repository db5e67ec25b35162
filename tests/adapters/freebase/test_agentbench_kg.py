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

YEAR = "computer.computer.year"
NS = "http://rdf.freebase.com/ns/"
TRIPLES = [
    ("m.apple", "computer.maker.makes", "m.mac1"),
    ("m.apple", "computer.maker.makes", "m.mac2"),
    ("m.apple", "computer.maker.makes", "m.mac3"),
    ("m.68040", "computer.processor.used_in", "m.mac2"),
    ("m.68040", "computer.processor.used_in", "m.mac3"),
    ("m.68040", "computer.processor.used_in", "m.next"),
    ("m.mac2", "computer.computer.designer", "m.ann"),
    ("m.mac3", "computer.computer.designer", "m.bob"),
    ("m.mac1", YEAR, 1984),
    ("m.mac2", YEAR, 1990),
    ("m.mac3", YEAR, 1993),
    ("m.apple", "type.object.secret", "m.not_in_the_ontology"),
]
MAKES, USED_IN = "get_neighbors(m.apple,computer.maker.makes)", "get_neighbors(m.68040,computer.processor.used_in)"
BOTH = {"mac": "m.apple", "Motorola 68040": "m.68040"}
ANN, BOB = ({"answer_type": "Entity", "answer_argument": f"m.{n.lower()}", "entity_name": n} for n in ("Ann", "Bob"))
QUESTIONS: list[dict[str, Any]] = [  # as in std.json
    {"question": text, "qid": f"{number}_grailqa", "source": "grailqa", "entities": entities, "s_expression": form}
    | {"actions": actions, "answer": answer}
    for number, text, entities, form, actions, answer in (
        (
            *(1, "how many mac models used motorola 68040 processors?", BOTH, "(COUNT ...)"),
            ["get_relations(m.apple)", MAKES, "get_relations(m.68040)", USED_IN, "intersection(#0,#1)", "count(#2)"],
            [{"answer_type": "Value", "answer_argument": "2"}],
        ),
        (
            *(2, "who designed them?", BOTH, "(AND ...)"),
            [MAKES, USED_IN, "intersection(#0,#1)", "get_neighbors(#2,computer.computer.designer)"],
            [ANN, BOB],
        ),
        (
            *(3, "who designed the latest?", {"mac": "m.apple"}, "(ARGMAX ...)"),
            [MAKES, "get_attributes(#0)", f"argmax(#0,{YEAR})", "get_neighbors(#1,computer.computer.designer)"],
            [BOB],
        ),
    )
]
MADE = "get_neighbors(m.apple, computer.maker.makes)"  # as a policy may write it
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
    relations = ["computer.maker.makes", "computer.processor.used_in", "computer.computer.designer"]
    vocabulary = {"relations": relations, "attributes": [YEAR], "classes": []}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "fb_roles").write_text(
        "computer.maker computer.maker.makes computer.computer\n"
        "computer.processor computer.processor.used_in computer.computer\n"
        "computer.computer computer.computer.designer people.person\n"
    )
    return {"train": str(path), "held_out": str(path), "ontology": str(tmp_path), "sparql_url": sparql_url}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_agentbench_kg_keeps_the_contract(check: Callable[..., None], options: dict[str, str]) -> None:
    samples = ("get_relations(m.apple)",)
    keeps(check, Case("agentbench_kg", max_turns=10, noisy_success=0, options=options, share=0.03, samples=samples))


def test_tools_tell_kinds_and_what_agentbench_lets_be_used(options: dict[str, str]) -> None:
    ways = (
        ("get_relations(m.apple)", "computer.maker.makes"),
        (MADE, "#0 computer.computer"),
        ("get_attributes(#0)", YEAR),
        (f"argmin(#0, {YEAR})", "#1 computer.computer"),
        ("get_relations(#1)", "none"),
        ("count(#0)", "#2 type.int"),
        (MADE, "#0 computer.computer"),
    )
    opening, *observations = acted("agentbench_kg", options, 2, [action for action, _ in ways])
    assert said(opening) == "who designed the latest?\nEntities: mac: m.apple"
    assert list(map(said, observations)) == [answer for _, answer in ways]


def test_the_score_is_f1_over_the_entities(options: dict[str, str]) -> None:
    ways = {
        (MADE, "get_neighbors(#0, computer.computer.designer)"): 1.0,
        (MADE, f"argmax(#0, {YEAR})", "get_neighbors(#1, computer.computer.designer)"): 2 / 3,
        (MADE,): 0.0,
    }
    for way, score in ways.items():
        end = acted("agentbench_kg", options, 1, [*way, f"answer(#{len(way) - 1})"])[-1]
        assert (end.terminated, end.score) == (True, pytest.approx(score)), way
    counted = [*QUESTIONS[0]["actions"], "answer(#3)"]
    assert acted("agentbench_kg", options, 0, counted)[-1].score == 1.0


@pytest.mark.parametrize(
    "action",
    [
        *("get_neighbors(m.apple, type.object.secret)", "get_neighbors(m.nothing, computer.maker.makes)"),
        *("count(m.apple)", "intersection(#0, #9)", "intersection(#0, #1)", "get_relations(m.x } UNION { ?x ?r ?o)"),
        *("answer(m.apple)", "get_relations(http://example.com)", "argmax(#0, computer.maker.makes)"),
        *("get_relations(#1)", "count(#1)", "answer(#-1)"),
    ],
)
def test_what_makes_no_sense_is_refused_or_gives_nothing(options: dict[str, str], action: str) -> None:
    observation = acted("agentbench_kg", options, 0, [MADE, "count(#0)", action])[-1]
    assert not observation.done
    assert not observation.valid_action or said(observation) == "nothing"


def test_a_program_does_not_grow_without_end(options: dict[str, str]) -> None:
    grown = [MADE, "get_neighbors(m.68040, computer.processor.used_in)"]
    grown += [f"intersection(#{number}, #{number + 1})" for number in range(12)]
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
