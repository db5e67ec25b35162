"""Databases of three tables: two kinds of things, and the events that join one of each."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

Row = tuple[int | str | float | None, ...]
Schema = dict[str, dict[str, str]]  # by table, by column: its type, as a declaration says it
Tables = dict[str, tuple[Row, ...]]  # by name; the rows of each in the order of their ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """A table `id, name, group, number`, in the words of its domain."""

    table: str
    one: str  # how one of them is called
    names: tuple[str, ...]
    group: str  # a column of texts that several share
    groups: tuple[str, ...]
    number: str  # a column of whole numbers

    @property
    def columns(self) -> tuple[str, ...]:
        return ("id", "name", self.group, self.number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    first: Thing
    second: Thing
    event: str  # the table `id, FIRST_id, SECOND_id, amount` that joins them
    event_one: str
    amount: str

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Of each table; the first is its primary key."""
        return {
            self.first.table: self.first.columns,
            self.second.table: self.second.columns,
            self.event: ("id", f"{self.first.one}_id", f"{self.second.one}_id", self.amount),
        }

    @property
    def schema(self) -> Schema:
        """Texts stand in columns of texts; everything else is a whole number."""
        texts = ("name", self.first.group, self.second.group)
        return {
            table: {
                column: "INTEGER PRIMARY KEY" if column == "id" else "TEXT" if column in texts else "INTEGER"
                for column in columns
            }
            for table, columns in self.columns.items()
        }


PEOPLE = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana", "Igor", "June", "Kai", "Lena", "Milo", "Nora",
          "Otto", "Pia", "Quinn", "Rosa", "Sven", "Tara", "Ugo", "Vera", "Walt", "Yara")  # fmt: skip
TOWNS = ("Arden", "Corby", "Dover", "Elgin", "Kelso", "Malton", "Ripley", "Selby")
DOMAINS = (
    Domain(
        first=Thing(table="customers", one="customer", names=PEOPLE, group="city", groups=TOWNS, number="credit"),
        second=Thing(table="products", one="product", names=("boots", "chair", "clock", "drum", "kettle", "lamp",
                     "rope", "table", "tent", "vase"), group="category", groups=("home", "music", "outdoor", "office"),
                     number="price"),
        event="orders", event_one="order", amount="quantity",
    ),
    Domain(
        first=Thing(table="students", one="student", names=PEOPLE, group="home", groups=TOWNS, number="age"),
        second=Thing(table="courses", one="course", names=("algebra", "botany", "chess", "drawing", "geology", "logic",
                     "opera", "poetry", "rowing", "zoology"), group="faculty", groups=("arts", "science", "sports"),
                     number="credits"),
        event="exams", event_one="exam", amount="mark",
    ),
    Domain(
        first=Thing(table="readers", one="reader", names=PEOPLE, group="district", groups=TOWNS, number="fee"),
        second=Thing(table="books", one="book", names=("Atlas", "Breeze", "Cinder", "Dunes", "Echoes", "Frost",
                     "Garden", "Harbour", "Island", "Jasmine"), group="genre", groups=("crime", "history", "travel"),
                     number="pages"),
        event="loans", event_one="loan", amount="days",
    ),
    Domain(
        first=Thing(table="drivers", one="driver", names=PEOPLE, group="depot", groups=TOWNS, number="salary"),
        second=Thing(table="trucks", one="truck", names=("Badger", "Camel", "Donkey", "Elk", "Falcon", "Goat", "Heron",
                     "Ibis", "Jackal", "Koala"), group="make", groups=("Alta", "Borg", "Cresta"), number="load"),
        event="trips", event_one="trip", amount="distance",
    ),
)  # fmt: skip


def draw_tables(rng: random.Random, domain: Domain, *, num_rows: int) -> Tables:
    """`num_rows` of the first kind of thing, ten of the second at most, and twice as many events."""
    firsts = _draw_things(rng, domain.first, num_rows)
    seconds = _draw_things(rng, domain.second, num_rows)
    events = [
        (number, rng.randint(1, len(firsts)), rng.randint(1, len(seconds)), rng.randint(1, 40))
        for number in range(1, 2 * num_rows + 1)
    ]
    return {domain.first.table: firsts, domain.second.table: seconds, domain.event: tuple(events)}


def _draw_things(rng: random.Random, thing: Thing, num_rows: int) -> tuple[Row, ...]:
    names = rng.sample(thing.names, min(num_rows, len(thing.names)))
    numbers: Sequence[int] = rng.sample(range(41, 500), len(names))
    return tuple(
        (number, name, rng.choice(thing.groups), value)
        for number, (name, value) in enumerate(zip(names, numbers, strict=True), 1)
    )
