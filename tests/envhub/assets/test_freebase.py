"""Queries to a SPARQL endpoint with Freebase, and its replies; tests/adapters/freebase has a real engine."""

import asyncio
import json
import urllib.parse
from collections.abc import Iterator

import pytest

from slipstream.envhub.assets.freebase import Freebase, Variable, program_size
from slipstream.envhub.env import EnvError
from tests import http_stand_in
from tests.http_stand_in import HttpStandIn, Reply

MACS = Variable(
    tool="get_neighbors", arguments=("m.0zd6", "computer.computer.includes_models"), kind="computer.computer"
)
DESIGNERS = Variable(tool="get_neighbors", arguments=("#0", "computer.computer.designer"), kind="people.person")
BOTH = Variable(tool="intersection", arguments=("#0", "#1"), kind="people.person")
LATEST = Variable(tool="argmax", arguments=("#2", "people.person.born"), kind="people.person")
NUMBER = Variable(tool="count", arguments=("#2",), kind="type.int")
FOUND = (MACS, DESIGNERS, BOTH, LATEST, NUMBER)


class Asked(HttpStandIn):
    def __init__(self) -> None:
        self.queries: list[str] = []
        self.content, self.status = b'{"results": {"bindings": []}}', 200
        super().__init__(self._reply)
        self.freebase = Freebase(url=f"{self.url}/sparql")

    def _reply(self, request: http_stand_in.Asked) -> Reply:
        form = urllib.parse.parse_qs(request.body.decode())
        assert request.headers["Accept"] == "application/sparql-results+json" == form["format"][0]
        self.queries.append(" ".join(form["query"][0].split()))
        return self.status, {}, self.reply(self.queries[-1])

    def reply(self, query: str) -> bytes:
        return self.content


@pytest.fixture
def asked() -> Iterator[Asked]:
    with Asked() as asked:
        yield asked


QUERIES = {
    "m.0zd6": "SELECT DISTINCT ?x WHERE { VALUES ?x { ns:m.0zd6 } } LIMIT 20000",
    "#0": "SELECT DISTINCT ?x WHERE { ns:m.0zd6 ns:computer.computer.includes_models ?x . } LIMIT 20000",
    "#1": "SELECT DISTINCT ?x WHERE { ns:m.0zd6 ns:computer.computer.includes_models ?xs . "
    "?xs ns:computer.computer.designer ?x . } LIMIT 20000",
    "#2": "SELECT DISTINCT ?x WHERE { ns:m.0zd6 ns:computer.computer.includes_models ?x . "
    "ns:m.0zd6 ns:computer.computer.includes_models ?xbs . ?xbs ns:computer.computer.designer ?x . } "
    "LIMIT 20000",
    "#3": "SELECT DISTINCT ?x WHERE { { SELECT ?x WHERE { ns:m.0zd6 ns:computer.computer.includes_models ?x . "
    "ns:m.0zd6 ns:computer.computer.includes_models ?xbs . ?xbs ns:computer.computer.designer ?x . "
    "?x ns:people.person.born ?xn . } ORDER BY DESC(?xn) LIMIT 1 } } LIMIT 20000",
    "#4": "SELECT (COUNT(DISTINCT ?x) AS ?n) WHERE { ns:m.0zd6 ns:computer.computer.includes_models ?x . "
    "ns:m.0zd6 ns:computer.computer.includes_models ?xbs . ?xbs ns:computer.computer.designer ?x . }",
}


@pytest.mark.parametrize("name", QUERIES)
def test_a_variable_is_queried_by_its_whole_program(asked: Asked, name: str) -> None:
    asyncio.run(asked.freebase.members(FOUND, name))
    assert asked.queries == [f"PREFIX ns: <http://rdf.freebase.com/ns/> {QUERIES[name]}"]


def test_rows_are_freebases_own_names_without_their_prefix(asked: Asked) -> None:
    rows = [{"x": {"type": "uri", "value": "http://rdf.freebase.com/ns/m.1"}}, {"x": {"value": "5", "type": "literal"}}]
    asked.content = json.dumps({"head": {"vars": ["x"]}, "results": {"bindings": rows}}).encode()
    assert asyncio.run(asked.freebase.members(FOUND, "#1")) == {"m.1", "5"}
    assert not asyncio.run(asked.freebase.is_empty(FOUND, "#1"))
    assert asked.queries[-1].endswith("LIMIT 1")


def test_the_size_of_a_program_counts_repeated_calls() -> None:
    assert [program_size(FOUND[:number], FOUND[number]) for number in range(5)] == [1, 2, 4, 5, 5]


def test_a_malformed_reply_is_an_environment_failure(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, content, why in (
        (503, b"busy", "replied with status 503: b'busy'"),
        (200, b"<html>", "reply is not JSON results"),
        (200, b'{"results": {"bindings": [{"x": 3}]}}', "reply is not JSON results"),
        (200, b"[" * 100_000, "reply is not JSON results"),
    ):
        asked.status, asked.content = status, content
        with pytest.raises(EnvError, match=why):
            asyncio.run(asked.freebase.members(FOUND, "#1"))
    monkeypatch.setattr("slipstream.envhub.assets.freebase.MAX_REPLY_BYTES", 1000)
    asked.content = b'{"results": {"bindings": []}, "more": "' + b"x" * 2000 + b'"}'
    with pytest.raises(EnvError, match="failed: the reply has more than 1000 bytes"):
        asyncio.run(asked.freebase.members(FOUND, "#1"))
