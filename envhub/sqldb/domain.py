"""Draws databases of three tables: two kinds of things, and events that join one thing of each kind."""

import random
from dataclasses import dataclass

from slipstream.envhub.name_list import name_list

NUM_ROWS = 8  # of each kind of thing

Row = tuple[int | str | float | None, ...]
Schema = dict[str, dict[str, str]]  # table -> column -> its SQL type
Tables = dict[str, tuple[Row, ...]]  # table -> its rows, sorted by id


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """A table with the columns `id, name, group, number`; the last two have names of the domain, such as city."""

    table: str
    one: str  # the singular of `table`
    names: tuple[str, ...]
    group: str  # the name of a text column whose values repeat
    groups: tuple[str, ...]
    number: str  # the name of an integer column

    @property
    def columns(self) -> tuple[str, ...]:
        return ("id", "name", self.group, self.number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    first: Thing
    second: Thing
    event: str  # the table with the columns `id, FIRST_id, SECOND_id, amount` that joins them
    amount: str

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """The columns of each table. The first is the primary key."""
        return {
            self.first.table: self.first.columns,
            self.second.table: self.second.columns,
            self.event: ("id", f"{self.first.one}_id", f"{self.second.one}_id", self.amount),
        }

    @property
    def schema(self) -> Schema:
        """The SQL type of each column: TEXT for names and groups, INTEGER for all others."""
        texts = ("name", self.first.group, self.second.group)
        return {
            table: {
                column: "INTEGER PRIMARY KEY" if column == "id" else "TEXT" if column in texts else "INTEGER"
                for column in columns
            }
            for table, columns in self.columns.items()
        }


PEOPLE = name_list(
    """
    Ada, Ben, Cleo, Dora, Emil, Fay, Gus, Hana, Igor, June, Kai, Lena, Milo, Nora, Otto, Pia, Quinn, Rosa, Sven,
    Tara, Ugo, Vera, Walt, Yara
    """
)
TOWNS = ("Arden", "Corby", "Dover", "Elgin", "Kelso", "Malton", "Ripley", "Selby")
DOMAINS = (
    Domain(
        first=Thing(table="customers", one="customer", names=PEOPLE, group="city", groups=TOWNS, number="credit"),
        second=Thing(
            table="products",
            one="product",
            names=("boots", "chair", "clock", "drum", "kettle", "lamp", "rope", "table", "tent", "vase"),
            group="category",
            groups=("home", "music", "outdoor", "office"),
            number="price",
        ),
        event="orders",
        amount="quantity",
    ),
    Domain(
        first=Thing(table="students", one="student", names=PEOPLE, group="home", groups=TOWNS, number="age"),
        second=Thing(
            table="courses",
            one="course",
            names=name_list("algebra, botany, chess, drawing, geology, logic, opera, poetry, rowing, zoology"),
            group="faculty",
            groups=("arts", "science", "sports"),
            number="credits",
        ),
        event="exams",
        amount="mark",
    ),
    Domain(
        first=Thing(table="readers", one="reader", names=PEOPLE, group="district", groups=TOWNS, number="fee"),
        second=Thing(
            table="books",
            one="book",
            names=name_list("Atlas, Breeze, Cinder, Dunes, Echoes, Frost, Garden, Harbour, Island, Jasmine"),
            group="genre",
            groups=("crime", "history", "travel"),
            number="pages",
        ),
        event="loans",
        amount="days",
    ),
    Domain(
        first=Thing(table="drivers", one="driver", names=PEOPLE, group="depot", groups=TOWNS, number="salary"),
        second=Thing(
            table="trucks",
            one="truck",
            names=("Badger", "Camel", "Donkey", "Elk", "Falcon", "Goat", "Heron", "Ibis", "Jackal", "Koala"),
            group="make",
            groups=("Alta", "Borg", "Cresta"),
            number="load",
        ),
        event="trips",
        amount="distance",
    ),
)


def draw_tables(rng: random.Random, domain: Domain) -> Tables:
    """Return tables with NUM_ROWS things of each kind, and twice as many events."""
    tables = {thing.table: _draw_things(rng, thing) for thing in (domain.first, domain.second)}
    events = [
        (number, rng.randint(1, NUM_ROWS), rng.randint(1, NUM_ROWS), rng.randint(1, 40))
        for number in range(1, 2 * NUM_ROWS + 1)
    ]
    return {**tables, domain.event: tuple(events)}


def _draw_things(rng: random.Random, thing: Thing) -> tuple[Row, ...]:
    names = rng.sample(thing.names, NUM_ROWS)
    numbers = rng.sample(range(41, 500), NUM_ROWS)
    return tuple(
        (number, name, rng.choice(thing.groups), value)
        for number, (name, value) in enumerate(zip(names, numbers, strict=True), 1)
    )
