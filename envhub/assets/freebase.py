"""Queries to Freebase, through the user's SPARQL endpoint, for programs of AgentBench's tool calls.

A variable stands for a call. Its members are computed by the endpoint from the whole program, and only when needed.
"""

import json
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from slipstream.common.process.http_answer import Passing, requested
from slipstream.envhub.env import EnvError

PREFIX = "http://rdf.freebase.com/ns/"
MAX_REPLY_BYTES = 16 << 20
MAX_ROWS = 20_000
QUERY_S = 60.0
ENTITY = re.compile(r"[mg]\.\w+", re.ASCII)
RELATION = re.compile(r"\w+(?:\.\w+)+", re.ASCII)


class Variable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A variable: the call that made it. An argument #k is the variable of that number, counted from 0."""

    tool: str  # get_neighbors, intersection, argmax, argmin or count
    arguments: tuple[str, ...]
    kind: str  # Freebase's name for the type of its members


@dataclass(frozen=True, kw_only=True, slots=True)
class Freebase:
    url: str

    async def relations(self, found: Sequence[Variable], name: str) -> set[str]:
        """Return the relations from an entity or a variable. Raises EnvError if the endpoint fails."""
        rows = await self._query(f"SELECT DISTINCT ?r WHERE {{ {_pattern(found, name)} ?x ?r ?o . }}")
        return {row["r"] for row in rows}

    async def is_empty(self, found: Sequence[Variable], name: str) -> bool:
        """Whether a variable has no members. Raises EnvError if the endpoint fails."""
        return not await self._query(f"SELECT ?x WHERE {{ {_pattern(found, name)} }} LIMIT 1")

    async def members(self, found: Sequence[Variable], name: str) -> set[str]:
        """Return the members of a variable, or the number for a count. Raises EnvError if the endpoint fails."""
        last = _variable(found, name)
        if last is not None and last.tool == "count":
            counted = _pattern(found, last.arguments[0])
            rows = await self._query(f"SELECT (COUNT(DISTINCT ?x) AS ?n) WHERE {{ {counted} }}")
            return {row["n"] for row in rows}
        rows = await self._query(f"SELECT DISTINCT ?x WHERE {{ {_pattern(found, name)} }} LIMIT {MAX_ROWS}")
        return {row["x"] for row in rows}

    async def _query(self, query: str) -> list[dict[str, str]]:
        """Return the rows of the result, with Freebase's names without their prefix. Raises EnvError."""
        form = {"query": f"PREFIX ns: <{PREFIX}>\n{query}", "format": "application/sparql-results+json"}
        headers = {"Accept": form["format"], "Content-Type": "application/x-www-form-urlencoded"}
        body = urllib.parse.urlencode(form).encode()
        try:
            reply = await requested(self.url, body, headers, timeout_s=QUERY_S, max_bytes=MAX_REPLY_BYTES)
        except (aiohttp.ClientError, TimeoutError, Passing) as error:
            raise EnvError(f"the SPARQL endpoint {self.url} failed: {str(error) or type(error).__name__}") from error
        if reply.status != 200:
            raise EnvError(f"the SPARQL endpoint replied with status {reply.status}: {reply.body[:200]!r}")
        return _rows(reply.body)


def _rows(content: bytes) -> list[dict[str, str]]:
    try:
        bindings: list[Mapping[str, Mapping[str, Any]]] = json.loads(content)["results"]["bindings"]
        return [{name: str(cell["value"]).removeprefix(PREFIX) for name, cell in row.items()} for row in bindings]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EnvError(f"the SPARQL endpoint's reply is not JSON results: {content[:200]!r}") from error


def _variable(found: Sequence[Variable], name: str) -> Variable | None:
    return found[int(name[1:])] if name.startswith("#") else None


def program_size(found: Sequence[Variable], variable: Variable) -> int:
    """Return the number of calls in the program of `variable`, counting repeated calls."""
    sizes: list[int] = []
    for each in (*found, variable):
        sizes.append(1 + sum(sizes[int(name[1:])] for name in each.arguments if name.startswith("#")))
    return sizes[-1]


def _pattern(found: Sequence[Variable], name: str, sign: str = "?x", inner: str = "?x") -> str:
    """Return the pattern that binds `sign` to an entity or a variable's members.

    The names of all other SPARQL variables in it begin with `inner`.
    """
    last = _variable(found, name)
    if last is None:
        return f"VALUES {sign} {{ ns:{name} }}"
    first, second = last.arguments[0], last.arguments[-1]
    if last.tool == "get_neighbors":
        source = f"{inner}s"
        if not first.startswith("#"):
            return f"ns:{first} ns:{second} {sign} ."
        return f"{_pattern(found, first, source, source)} {source} ns:{second} {sign} ."
    if last.tool == "intersection":
        return f"{_pattern(found, first, sign, f'{inner}a')} {_pattern(found, second, sign, f'{inner}b')}"
    order, number = "DESC" if last.tool == "argmax" else "ASC", f"{inner}n"
    within = f"{_pattern(found, first, sign, inner)} {sign} ns:{second} {number} ."
    return f"{{ SELECT {sign} WHERE {{ {within} }} ORDER BY {order}({number}) LIMIT 1 }}"
