"""`bird`: questions of BIRD and of Spider to the databases of the user's copy, answered in SQL.

Scored by execution accuracy as BIRD measures it (https://arxiv.org/abs/2305.03111): the rows that the answer's query
returns and those of the true one are the same set.
"""

import asyncio
import functools
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from common.message import Message
from common.trajectory import Task
from envhub.asset import asset_path, item_of, named_files, read_json
from envhub.env import Env, EnvError
from envhub.sqldb.sqldb import RULES, shown_rows, verb_and_rest
from envhub.sqldb.engine import OF_A_POLICY, OF_THE_USER, SqlError, declarations, query_file
from envhub.world import Change, WorldEnv

FETCH = (
    "get BIRD from bird-bench.github.io or Spider from yale-lily.github.io/spider, unpack it, and give the path of a "
    "file of questions such as dev.json"
)
FETCH_DATABASES = (
    "give the folder that holds DB_ID/DB_ID.sqlite, such as dev_databases of BIRD or database of Spider; "
    "it comes with the questions"
)


class BirdItem(msgspec.Struct):
    """A question of either, as far as it is needed."""

    db_id: str
    question: str
    sql: str = msgspec.field(name="SQL", default="")  # BIRD's
    query: str = ""  # Spider's
    evidence: str = ""  # what BIRD tells beside

    @property
    def true_sql(self) -> str:
        return self.sql or self.query


class BirdState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A database that is only read has no other state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BirdWorld:
    """One question to one database."""

    item: BirdItem
    database: Path

    @property
    def opening(self) -> tuple[Message, ...]:
        asked = [*declarations(self.database), self.item.question, self.item.evidence]
        return (Message("system", RULES), Message("user", "\n".join(line for line in asked if line)))

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self.item.true_sql,)

    @property
    def first(self) -> BirdState:
        return BirdState()

    async def act(self, state: BirdState, action: str) -> Change[BirdState]:
        verb, query = verb_and_rest(action)
        if verb not in ("sql", "commit") or not query:
            return Change(state=state, text="say sql QUERY or commit QUERY", valid=False)
        try:
            columns, rows = await asyncio.to_thread(query_file, self.database, query, limits=OF_A_POLICY)
        except SqlError as error:
            return Change(state=state, text=f"error: {error}", valid=False)
        if verb == "sql":
            return Change(state=state, text=shown_rows(columns, rows))
        try:
            _, true_rows = await asyncio.to_thread(query_file, self.database, self.item.true_sql, limits=OF_THE_USER)
        except SqlError as error:
            raise EnvError(f"the file's own query for {self.item.question!r} fails: {error}") from error
        return Change(state=state, text="committed", over=True, score=float(set(rows) == set(true_rows)))

    def admissible(self, state: BirdState) -> None:
        return None

    def expert(self, state: BirdState) -> str:
        return f"commit {self.item.true_sql}"


def make_bird_env(*, train: str = "", held_out: str = "", databases: str = "") -> Env:
    """An environment of BIRD's or Spider's questions. Raises ValueError where a file or a database is missing.

    `train` and `held_out` are files of questions, used by turns, `databases` is the folder of the databases of both.
    """
    folder = asset_path("databases", databases, fetch=FETCH_DATABASES)
    items = {
        split: _playable(asset_path(split, path, fetch=FETCH), folder)
        for split, path in named_files(train, held_out, fetch=FETCH).items()
    }
    return WorldEnv(
        f"bird {train} {held_out} {databases}",
        state=BirdState,
        make_world=partial(make_bird, items=items, folder=folder),
    )


def make_bird(task: Task, *, items: dict[str, list[BirdItem]], folder: Path) -> BirdWorld:
    item = item_of(task, items)
    return BirdWorld(item=item, database=_database(folder, item.db_id))


@functools.lru_cache(maxsize=4)
def _playable(path: Path, folder: Path) -> list[BirdItem]:
    """The file's questions. Raises ValueError for one without a query, and for a database that is not there."""
    items: list[BirdItem] = read_json(path, list[BirdItem])
    for number, item in enumerate(items):
        if not item.true_sql:
            raise ValueError(f"{path}, question {number}: neither SQL nor query says what is right; {FETCH}")
    for db_id in {item.db_id for item in items}:
        if not re.fullmatch(r"[\w.-]+", db_id) or not _database(folder, db_id).is_file():
            raise ValueError(f"`env.options.databases`: {_database(folder, db_id)} is not there; {FETCH_DATABASES}")
    return items


def _database(folder: Path, db_id: str) -> Path:
    return folder / db_id / f"{db_id}.sqlite"
