"""`bird`: questions of BIRD and of Spider about databases in the user's copy, answered in SQL.

The score is BIRD's execution accuracy (https://arxiv.org/abs/2305.03111): 1 if the answer's query returns the same set
of rows as the true query.
"""

import asyncio
import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slipstream.envhub.env import Env, EnvError
from slipstream.envhub.sqldb.sqldb import RULES, shown_rows, verb_and_rest
from slipstream.envhub.sqldb.sqlite_engine import POLICY_LIMITS, USER_LIMITS, SqlError, declarations, query_file
from slipstream.envhub.user_files import asset_path, item_of, read_files, read_records
from slipstream.envhub.world import Change, InvalidAction, WorldEnv

FETCH = (
    "get BIRD from bird-bench.github.io or Spider from yale-lily.github.io/spider, unpack it, and give the path of a "
    "file of questions such as dev.json"
)
FETCH_DATABASES = (
    "give the folder that contains DB_ID/DB_ID.sqlite, such as dev_databases of BIRD or database of Spider; "
    "it comes with the questions"
)


class BirdItem(msgspec.Struct):
    """The fields of a question of BIRD or Spider that this environment uses."""

    db_id: str
    question: str
    sql: str = msgspec.field(name="SQL", default="")  # BIRD's
    query: str = ""  # Spider's
    evidence: str = ""  # BIRD's hint

    @property
    def true_sql(self) -> str:
        return self.sql or self.query


class BirdState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Empty, because the database is only read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BirdWorld:
    item: BirdItem
    database: Path
    first: BirdState = field(default_factory=BirdState)

    @property
    def opening(self) -> str:
        lines = [*declarations(self.database), self.item.question, self.item.evidence]
        return "\n".join(line for line in lines if line)

    async def act(self, state: BirdState, action: str) -> Change[BirdState]:
        verb, query = verb_and_rest(action)
        if verb not in ("sql", "commit") or not query:
            raise InvalidAction("say sql QUERY or commit QUERY")
        columns, rows = await asyncio.to_thread(query_file, self.database, query, limits=POLICY_LIMITS)
        if verb == "sql":
            return Change(state=state, text=shown_rows(columns, rows))
        try:
            _, true_rows = await asyncio.to_thread(query_file, self.database, self.item.true_sql, limits=USER_LIMITS)
        except SqlError as error:
            raise EnvError(f"the file's own query for {self.item.question!r} failed: {error.why}") from error
        return Change(state=state, text="committed", over=True, score=float(set(rows) == set(true_rows)))

    def expert(self, state: BirdState) -> str:
        return f"commit {self.item.true_sql}"


def make_bird_env(*, train: str = "", held_out: str = "", databases: str = "") -> Env:
    """Make an environment of BIRD's or Spider's questions. Raises ValueError if a file or a database is missing.

    `train` and `held_out` are files of questions, used in turn; `databases` is the folder with the databases of both.
    """
    folder = asset_path("databases", databases, fetch=FETCH_DATABASES)
    worlds = read_files(_playable, train, held_out, folder, fetch=FETCH)
    return WorldEnv(f"bird {train} {held_out} {databases}", make_world=lambda task: item_of(task, worlds), rules=RULES)


def _playable(path: Path, folder: Path) -> list[BirdWorld]:
    """Return the file's questions. Raises ValueError if a question has no query or its database is missing."""
    items = read_records(path, BirdItem)
    for number, item in enumerate(items):
        if not item.true_sql:
            raise ValueError(f"{path}, question {number}: it must have its true query in SQL or query; {FETCH}")
    databases = {item.db_id: folder / item.db_id / f"{item.db_id}.sqlite" for item in items}
    for db_id, database in databases.items():
        if not re.fullmatch(r"[\w.-]+", db_id) or not database.is_file():
            raise ValueError(f"`env.options.databases`: {database} is missing; {FETCH_DATABASES}")
        try:
            declarations(database)
        except SqlError as error:
            raise ValueError(
                f"`env.options.databases`: {database} cannot be read: {error.why}; {FETCH_DATABASES}"
            ) from None
    return [BirdWorld(item=item, database=databases[item.db_id]) for item in items]
