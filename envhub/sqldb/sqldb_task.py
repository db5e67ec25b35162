"""Draws requests for a database: a question or a change in words, and the SQL statement that solves it."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.envhub.sqldb.domain import Domain, Tables, Thing


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    text: str
    sql: str

    @property
    def writes(self) -> bool:
        return not self.sql.startswith("SELECT")


def draw_request(rng: random.Random, domain: Domain, tables: Tables, *, level: int, task: str) -> Request:
    """Return a request of `level`. `task` is "read", "write", or "any" for either."""
    kinds = [*(READS[level] if task != "write" else ()), *(WRITES[level] if task != "read" else ())]
    return rng.choice(kinds)(rng, domain, tables)


_Draw = Callable[[random.Random, Domain, Tables], Request]


def _thing(rng: random.Random, domain: Domain) -> Thing:
    return rng.choice((domain.first, domain.second))


def _name(rng: random.Random, thing: Thing, tables: Tables) -> str:
    return str(rng.choice(tables[thing.table])[1])


def _group(rng: random.Random, thing: Thing, tables: Tables) -> str:
    return str(rng.choice(tables[thing.table])[2])


def _number_of_one(rng: random.Random, domain: Domain, tables: Tables) -> Request:
    thing = _thing(rng, domain)
    name = _name(rng, thing, tables)
    return Request(
        text=f"What is the {thing.number} of the {thing.one} named {name}?",
        sql=f"SELECT {thing.number} FROM {thing.table} WHERE name = '{name}'",
    )


def _count_of_group(rng: random.Random, domain: Domain, tables: Tables) -> Request:
    thing = _thing(rng, domain)
    group = _group(rng, thing, tables)
    return Request(
        text=f"How many {thing.table} have the {thing.group} {group}?",
        sql=f"SELECT count(*) FROM {thing.table} WHERE {thing.group} = '{group}'",
    )


def _names_above(rng: random.Random, domain: Domain, tables: Tables) -> Request:
    thing, bound = _thing(rng, domain), rng.randrange(100, 400, 10)
    return Request(
        text=f"What are the names of the {thing.table} with a {thing.number} of more than {bound}?",
        sql=f"SELECT name FROM {thing.table} WHERE {thing.number} > {bound}",
    )


def _total_of_group(rng: random.Random, domain: Domain, tables: Tables) -> Request:
    thing = _thing(rng, domain)
    group = _group(rng, thing, tables)
    word, function = rng.choice((("sum", "sum"), ("highest", "max"), ("lowest", "min")))
    return Request(
        text=f"What is the {word} {thing.number} of all {thing.table} whose {thing.group} is {group}?",
        sql=f"SELECT {function}({thing.number}) FROM {thing.table} WHERE {thing.group} = '{group}'",
    )


def _extreme(rng: random.Random, domain: Domain, tables: Tables) -> Request:
    thing = _thing(rng, domain)
    group = _group(rng, thing, tables)
    word, order = rng.choice((("highest", "DESC"), ("lowest", "ASC")))
    return Request(
        text=f"Which {thing.one} of the {thing.group} {group} has the {word} {thing.number}? Give the name.",
        sql=f"SELECT name FROM {thing.table} WHERE {thing.group} = '{group}' ORDER BY {thing.number} {order} LIMIT 1",
    )


def _joined_names(rng: random.Random, domain: Domain, tables: Tables) -> Request:
    first, second = domain.first, domain.second
    name, bound = _name(rng, second, tables), rng.randrange(20)
    return Request(
        text=f"Which {first.table} have at least one of the {domain.event} with the {second.one} named {name} and a "
        f"{domain.amount} of more than {bound}? Give each name once.",
        sql=f"SELECT DISTINCT a.name FROM {first.table} a JOIN {domain.event} e ON e.{first.one}_id = a.id "
        f"JOIN {second.table} b ON b.id = e.{second.one}_id WHERE b.name = '{name}' "
        f"AND e.{domain.amount} > {bound}",
    )


def _joined_total(rng: random.Random, domain: Domain, tables: Tables) -> Request:
    thing = _thing(rng, domain)
    group, bound = _group(rng, thing, tables), rng.randrange(20)
    return Request(
        text=f"What is the total of each {domain.amount} of more than {bound}, over all {domain.event} of "
        f"{thing.table} whose {thing.group} is {group}?",
        sql=f"SELECT sum(e.{domain.amount}) FROM {domain.event} e JOIN {thing.table} t ON t.id = e.{thing.one}_id "
        f"WHERE t.{thing.group} = '{group}' AND e.{domain.amount} > {bound}",
    )


def _set_number(rng: random.Random, domain: Domain, tables: Tables) -> Request:
    thing, value = _thing(rng, domain), rng.randrange(500, 1000)
    name = _name(rng, thing, tables)
    return Request(
        text=f"Set the {thing.number} of the {thing.one} named {name} to {value}.",
        sql=f"UPDATE {thing.table} SET {thing.number} = {value} WHERE name = '{name}'",
    )


def _add_thing(rng: random.Random, domain: Domain, tables: Tables) -> Request:
    thing, value = _thing(rng, domain), rng.randrange(500, 1000)
    group, number = _group(rng, thing, tables), len(tables[thing.table]) + 1
    return Request(
        text=f"Add a {thing.one} with the id {number}, named Zed, of the {thing.group} {group} and with a "
        f"{thing.number} of {value}.",
        sql=f"INSERT INTO {thing.table} VALUES ({number}, 'Zed', '{group}', {value})",
    )


def _delete_events(rng: random.Random, domain: Domain, _: Tables) -> Request:
    bound = rng.randrange(5, 30)
    return Request(
        text=f"Delete all {domain.event} with a {domain.amount} of less than {bound}.",
        sql=f"DELETE FROM {domain.event} WHERE {domain.amount} < {bound}",
    )


def _raise_group(rng: random.Random, domain: Domain, tables: Tables) -> Request:
    thing, value = _thing(rng, domain), rng.randrange(5, 50)
    group = _group(rng, thing, tables)
    return Request(
        text=f"Raise the {thing.number} of all {thing.table} whose {thing.group} is {group} by {value}.",
        sql=f"UPDATE {thing.table} SET {thing.number} = {thing.number} + {value} WHERE {thing.group} = '{group}'",
    )


def _raise_joined(rng: random.Random, domain: Domain, tables: Tables) -> Request:
    first, second, value = domain.first, domain.second, rng.randrange(5, 50)
    name = _name(rng, second, tables)
    return Request(
        text=f"Raise by {value} the {first.number} of each of the {first.table} that have at least one of the "
        f"{domain.event} with the {second.one} named {name}.",
        sql=f"UPDATE {first.table} SET {first.number} = {first.number} + {value} WHERE id IN (SELECT e.{first.one}_id "
        f"FROM {domain.event} e JOIN {second.table} b ON b.id = e.{second.one}_id WHERE b.name = '{name}')",
    )


def _delete_joined(rng: random.Random, domain: Domain, tables: Tables) -> Request:
    thing = _thing(rng, domain)
    group = _group(rng, thing, tables)
    return Request(
        text=f"Delete all {domain.event} of {thing.table} whose {thing.group} is {group}.",
        sql=f"DELETE FROM {domain.event} WHERE {thing.one}_id IN (SELECT id FROM {thing.table} "
        f"WHERE {thing.group} = '{group}')",
    )


READS: dict[int, tuple[_Draw, ...]] = {
    1: (_number_of_one, _count_of_group, _names_above),
    2: (_total_of_group, _extreme),
    3: (_joined_names, _joined_total),
}
WRITES: dict[int, tuple[_Draw, ...]] = {
    1: (_set_number, _add_thing),
    2: (_delete_events, _raise_group),
    3: (_raise_joined, _delete_joined),
}
