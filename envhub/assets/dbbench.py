"""`dbbench`: the database tasks of AgentBench, from the user's file of them, in sqlite.

It scores as AgentBench does (https://arxiv.org/abs/2308.03688): answers as a set of texts, or as a number if there is
only one and it is a number; a change by the resulting rows. AgentBench runs the statements in MySQL, and this
environment in sqlite. Tasks whose own statement sqlite cannot execute are left out.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.envhub.env import Env, EnvError
from slipstream.envhub.sqldb.domain import Schema, Tables
from slipstream.envhub.sqldb.sqldb import SqlState, shown_rows, verb_and_rest
from slipstream.envhub.sqldb.sqlite_engine import SqlError, run_sql
from slipstream.envhub.user_files import item_of, read_files, read_lines
from slipstream.envhub.world import Change, InvalidAction, WorldEnv

CHANGES = ("INSERT", "DELETE", "UPDATE")
FETCH = "get data/dbbench/standard.jsonl (or dev.jsonl) of github.com/THUDM/AgentBench, and give its path"
RULES = (
    "You have a SQLite database. `sql STATEMENT` executes one statement and shows what it returns. Answer a question "
    'by `answer ["...", "..."]`, a JSON list of texts; after a change that was asked for, say `commit` alone.'
)

log = logging.getLogger(__name__)


class _Column(msgspec.Struct):
    name: str


class _Info(msgspec.Struct):
    columns: list[_Column]
    rows: list[list[Any]]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"each row must have {len(self.columns)} cells, one for each column")


class _Table(msgspec.Struct):
    table_name: str
    table_info: _Info


class DbItem(msgspec.Struct):
    """The fields of a task that this environment uses."""

    description: str
    label: list[str]  # the answer; for a change, its SQL statement
    table: _Table
    type: list[str]
    add_description: str = ""

    def __post_init__(self) -> None:
        if not self.type:
            raise ValueError("type must name the kind of the task, such as other or INSERT")
        if self.is_change and not self.label:
            raise ValueError("a change must have its SQL statement in label")

    @property
    def is_change(self) -> bool:
        return self.type[0] in CHANGES

    @property
    def schema(self) -> Schema:
        """The table's columns, all of type TEXT as in AgentBench."""
        return {self.table.table_name: {column.name: "TEXT" for column in self.table.table_info.columns}}

    @property
    def tables(self) -> Tables:
        rows = (tuple(None if cell is None else str(cell) for cell in row) for row in self.table.table_info.rows)
        return {self.table.table_name: tuple(rows)}


@dataclass(frozen=True, kw_only=True, slots=True)
class DbWorld:
    item: DbItem
    schema: Schema
    first: SqlState

    @property
    def opening(self) -> str:
        return f"{self.item.description}\n{self.item.add_description}".strip()

    async def act(self, state: SqlState, action: str) -> Change[SqlState]:
        verb, rest = verb_and_rest(action)
        if verb not in ("sql", "answer", "commit"):
            raise InvalidAction("say sql STATEMENT, answer [...] or commit")
        if verb == "sql":
            result = run_sql(self.schema, state.tables, rest)
            return Change(state=SqlState(tables=result.tables), text=shown_rows(result.columns, result.rows))
        if self.item.is_change:
            if verb == "answer" or rest:
                raise InvalidAction("a change is committed by commit alone")
            try:
                right = state.tables == run_sql(self.schema, self.first.tables, self.item.label[0]).tables
            except SqlError as error:
                raise EnvError(f"the file's own statement fails: {error}") from error
        else:
            answer = _texts(rest) if verb == "answer" else None
            if answer is None:
                raise InvalidAction('the answer is a JSON list of texts, answer ["..."]')
            right = is_right_answer(answer, self.item.label)
        return Change(state=state, text="committed", over=True, score=float(right))

    def expert(self, state: SqlState) -> str:
        """Return the file's own statement, then commit; or the file's answer."""
        if not self.item.is_change:
            return f"answer {json.dumps(self.item.label, ensure_ascii=False)}"
        return f"sql {self.item.label[0]}" if state == self.first else "commit"


def make_dbbench_env(*, train: str = "", held_out: str = "") -> Env:
    """Make an environment of AgentBench's database tasks. Raises ValueError if a file is missing or malformed.

    `train` and `held_out` are paths of files of tasks, used in turn.
    """
    worlds = read_files(_playable, train, held_out, fetch=FETCH)
    return WorldEnv(f"dbbench {train} {held_out}", make_world=lambda task: item_of(task, worlds), rules=RULES)


def is_right_answer(answer: list[str], label: list[str]) -> bool:
    """Whether both are the same set of texts, or each is the same single number: ["2.0"] equals ["2"]."""
    if set(answer) == set(label):
        return True
    try:
        return len(answer) == len(label) == 1 and float(answer[0]) == float(label[0])
    except ValueError:
        return False


def _playable(path: Path) -> list[DbWorld]:
    """Return the file's tasks that sqlite can hold, and whose own statement it can execute; log how many it cannot."""
    items = read_lines(path, DbItem)
    playable = [item for item in items if _can_be_played(item)]
    if num_left_out := len(items) - len(playable):
        why = "sqlite fails on their own statement or table"
        log.warning("%s: left out %d of %d tasks: %s", path, num_left_out, len(items), why)
    return [DbWorld(item=item, schema=item.schema, first=SqlState(tables=item.tables)) for item in playable]


def _can_be_played(item: DbItem) -> bool:
    try:
        result = run_sql(item.schema, item.tables, item.label[0] if item.is_change else "SELECT 1")
    except SqlError:
        return False
    return not item.is_change or result.tables != item.tables


def _texts(answer: str) -> list[str] | None:
    try:
        members = msgspec.json.decode(answer, type=list[str | int | float])
    except MALFORMED:
        return None
    return [str(member) for member in members]
