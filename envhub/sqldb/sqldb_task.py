"""Draws requests for a database: a question or a change in words, and the SQL statement that solves it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.envhub.sqldb.domain import Domain, Tables, Thing


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    text: str
    sql: str

    @property
    def writes(self) -> bool:
        return not self.sql.startswith("SELECT")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """A kind of request: what is drawn for it, in this order, and its texts with what was drawn.

    Both texts may also name the domain's `first` thing, `event` and `amount`. Where no `thing` is drawn, it is the
    domain's second.
    """

    draws: tuple[str, ...]
    text: str
    sql: str


# What is drawn alike in every domain; of a pair, the first is for the text and the second for the statement.
_CHOICES: dict[str, Sequence[Any]] = {
    "bound": range(100, 400, 10),
    "few": range(20),
    "some": range(5, 30),
    "by": range(5, 50),
    "value": range(500, 1000),
    "total": (("sum", "sum"), ("highest", "max"), ("lowest", "min")),
    "extreme": (("highest", "DESC"), ("lowest", "ASC")),
}

READS: dict[int, tuple[_Form, ...]] = {
    1: (
        _Form(
            draws=("thing", "name"),
            text="What is the {thing.number} of the {thing.one} named {name}?",
            sql="SELECT {thing.number} FROM {thing.table} WHERE name = '{name}'",
        ),
        _Form(
            draws=("thing", "group"),
            text="How many {thing.table} have the {thing.group} {group}?",
            sql="SELECT count(*) FROM {thing.table} WHERE {thing.group} = '{group}'",
        ),
        _Form(
            draws=("thing", "bound"),
            text="What are the names of the {thing.table} with a {thing.number} of more than {bound}?",
            sql="SELECT name FROM {thing.table} WHERE {thing.number} > {bound}",
        ),
    ),
    2: (
        _Form(
            draws=("thing", "group", "total"),
            text="What is the {total[0]} {thing.number} of all {thing.table} whose {thing.group} is {group}?",
            sql="SELECT {total[1]}({thing.number}) FROM {thing.table} WHERE {thing.group} = '{group}'",
        ),
        _Form(
            draws=("thing", "group", "extreme"),
            text="Which {thing.one} of the {thing.group} {group} has the {extreme[0]} {thing.number}? Give the name.",
            sql="SELECT name FROM {thing.table} WHERE {thing.group} = '{group}' "
            "ORDER BY {thing.number} {extreme[1]} LIMIT 1",
        ),
    ),
    3: (
        _Form(
            draws=("name", "few"),
            text="Which {first.table} have at least one of the {event} with the {thing.one} named {name} and a "
            "{amount} of more than {few}? Give each name once.",
            sql="SELECT DISTINCT a.name FROM {first.table} a JOIN {event} e ON e.{first.one}_id = a.id "
            "JOIN {thing.table} b ON b.id = e.{thing.one}_id WHERE b.name = '{name}' AND e.{amount} > {few}",
        ),
        _Form(
            draws=("thing", "group", "few"),
            text="What is the total of each {amount} of more than {few}, over all {event} of {thing.table} whose "
            "{thing.group} is {group}?",
            sql="SELECT sum(e.{amount}) FROM {event} e JOIN {thing.table} t ON t.id = e.{thing.one}_id "
            "WHERE t.{thing.group} = '{group}' AND e.{amount} > {few}",
        ),
    ),
}
WRITES: dict[int, tuple[_Form, ...]] = {
    1: (
        _Form(
            draws=("thing", "value", "name"),
            text="Set the {thing.number} of the {thing.one} named {name} to {value}.",
            sql="UPDATE {thing.table} SET {thing.number} = {value} WHERE name = '{name}'",
        ),
        _Form(
            draws=("thing", "value", "group", "new_id"),
            text="Add a {thing.one} with the id {new_id}, named Zed, of the {thing.group} {group} and with a "
            "{thing.number} of {value}.",
            sql="INSERT INTO {thing.table} VALUES ({new_id}, 'Zed', '{group}', {value})",
        ),
    ),
    2: (
        _Form(
            draws=("some",),
            text="Delete all {event} with a {amount} of less than {some}.",
            sql="DELETE FROM {event} WHERE {amount} < {some}",
        ),
        _Form(
            draws=("thing", "by", "group"),
            text="Raise the {thing.number} of all {thing.table} whose {thing.group} is {group} by {by}.",
            sql="UPDATE {thing.table} SET {thing.number} = {thing.number} + {by} WHERE {thing.group} = '{group}'",
        ),
    ),
    3: (
        _Form(
            draws=("by", "name"),
            text="Raise by {by} the {first.number} of each of the {first.table} that have at least one of the {event} "
            "with the {thing.one} named {name}.",
            sql="UPDATE {first.table} SET {first.number} = {first.number} + {by} WHERE id IN (SELECT e.{first.one}_id "
            "FROM {event} e JOIN {thing.table} b ON b.id = e.{thing.one}_id WHERE b.name = '{name}')",
        ),
        _Form(
            draws=("thing", "group"),
            text="Delete all {event} of {thing.table} whose {thing.group} is {group}.",
            sql="DELETE FROM {event} WHERE {thing.one}_id IN (SELECT id FROM {thing.table} "
            "WHERE {thing.group} = '{group}')",
        ),
    ),
}


def draw_request(rng: random.Random, domain: Domain, tables: Tables, *, level: int, task: str) -> Request:
    """Return a request of `level`. `task` is "read", "write", or "any" for either."""
    form = rng.choice([*(READS[level] if task != "write" else ()), *(WRITES[level] if task != "read" else ())])
    drawn: dict[str, Any] = {
        "first": domain.first,
        "thing": domain.second,
        "event": domain.event,
        "amount": domain.amount,
    }
    for what in form.draws:
        drawn[what] = _draw(rng, what, domain, tables, drawn["thing"])
    return Request(text=form.text.format_map(drawn), sql=form.sql.format_map(drawn))


def _draw(rng: random.Random, what: str, domain: Domain, tables: Tables, thing: Thing) -> Any:
    match what:
        case "thing":
            return rng.choice((domain.first, domain.second))
        case "name":
            return rng.choice(tables[thing.table])[1]
        case "group":
            return rng.choice(tables[thing.table])[2]
        case "new_id":
            return len(tables[thing.table]) + 1
    return rng.choice(_CHOICES[what])
