"""`dbbench`: the database tasks of AgentBench, from the user's file of them, in sqlite.

Scored as AgentBench scores (https://arxiv.org/abs/2308.03688): answers as a set of texts, a single one as a number
where it is one; a change by the rows that it leaves. There MySQL runs the statements; here sqlite does, and what of the
file's own changes is no SQLite is left out.
"""

import functools
import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from common.message import Message
from common.trajectory import Task
from envhub.asset import asset_path, item_of, named_files, read_lines
from envhub.env import Env
from envhub.sqldb.sqldb import shown_rows, verb_and_rest
from envhub.sqldb.domain import Schema, Tables
from envhub.sqldb.engine import SqlError, run_sql
from envhub.world import Change, WorldEnv

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


class _Table(msgspec.Struct):
    table_name: str
    table_info: _Info


class DbItem(msgspec.Struct):
    """One line of the file, as far as it is needed."""

    description: str
    label: list[str]  # the answer; of a change, the statement that does it
    table: _Table
    type: list[str]
    add_description: str = ""

    @property
    def is_change(self) -> bool:
        return self.type[0] in CHANGES

    @property
    def schema(self) -> Schema:
        """AgentBench declares every column a text."""
        return {self.table.table_name: {column.name: "TEXT" for column in self.table.table_info.columns}}

    @property
    def tables(self) -> Tables:
        rows = (tuple(map(str, row)) for row in self.table.table_info.rows)
        return {self.table.table_name: tuple(rows)}


class DbState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tables: Tables


@dataclass(frozen=True, kw_only=True, slots=True)
class DbWorld:
    """One table and what is asked about it."""

    item: DbItem
    schema: Schema
    first: DbState
    secrets: tuple[str, ...] = ()  # answers of a word or two stand in questions as well

    @property
    def opening(self) -> tuple[Message, ...]:
        asked = f"{self.item.description}\n{self.item.add_description}".strip()
        return (Message("system", RULES), Message("user", asked))

    async def act(self, state: DbState, action: str) -> Change[DbState]:
        verb, rest = verb_and_rest(action)
        if verb not in ("sql", "answer", "commit"):
            return _refused(state, "say sql STATEMENT, answer [...] or commit")
        if verb == "sql":
            try:
                result = run_sql(self.schema, state.tables, rest)
            except SqlError as error:
                return _refused(state, f"error: {error}")
            return Change(state=DbState(tables=result.tables), text=shown_rows(result.columns, result.rows))
        if self.item.is_change:
            if verb == "answer" or rest:
                return _refused(state, "a change is committed by commit alone")
            right = state.tables == run_sql(self.schema, self.first.tables, self.item.label[0]).tables
        else:
            said = _texts(rest) if verb == "answer" else None
            if said is None:
                return _refused(state, 'the answer is a JSON list of texts, answer ["..."]')
            right = is_right_answer(said, self.item.label)
        return Change(state=state, text="committed", over=True, score=float(right))

    def admissible(self, state: DbState) -> None:
        return None

    def expert(self, state: DbState) -> str:
        """The file's own statement, then commit; or the file's answer."""
        if not self.item.is_change:
            return f"answer {json.dumps(self.item.label, ensure_ascii=False)}"
        return f"sql {self.item.label[0]}" if state == self.first else "commit"


def make_dbbench_env(*, train: str = "", held_out: str = "") -> Env:
    """An environment of AgentBench's database tasks. Raises ValueError where a file is missing or of another form.

    `train` and `held_out` are paths of files of tasks, used by turns.
    """
    items = {
        split: _playable(asset_path(split, path, fetch=FETCH))
        for split, path in named_files(train, held_out, fetch=FETCH).items()
    }
    return WorldEnv(f"dbbench {train} {held_out}", state=DbState, make_world=partial(make_dbbench, items=items))


def make_dbbench(task: Task, *, items: dict[str, list[DbItem]]) -> DbWorld:
    item = item_of(task, items)
    return DbWorld(item=item, schema=item.schema, first=DbState(tables=item.tables))


def is_right_answer(said: list[str], label: list[str]) -> bool:
    """Sets of texts; of one member each, numbers that are the same: ["2.0"] is ["2"]."""
    if len(said) == len(label) == 1:
        try:
            return float(said[0]) == float(label[0])
        except ValueError:
            return said[0] == label[0]
    return set(said) == set(label)


@functools.lru_cache(maxsize=4)
def _playable(path: Path) -> list[DbItem]:
    """The file's tasks, without those whose own change sqlite cannot do; how many those are is logged."""
    items = read_lines(path, DbItem)
    playable = [item for item in items if _can_be_played(item)]
    if len(playable) < len(items):
        log.warning("%s: %d of %d tasks are left out, as sqlite cannot do their own change", path,
                    len(items) - len(playable), len(items))  # fmt: skip
    return playable


def _can_be_played(item: DbItem) -> bool:
    if not item.is_change:
        return True
    try:
        return run_sql(item.schema, item.tables, item.label[0]).tables != item.tables
    except SqlError:
        return False


def _texts(said: str) -> list[str] | None:
    try:
        members = msgspec.json.decode(said, type=list[str | int | float])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return [str(member) for member in members]


def _refused(state: DbState, why: str) -> Change[DbState]:
    return Change(state=state, text=why, valid=False)
