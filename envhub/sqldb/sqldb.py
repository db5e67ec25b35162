"""`sqldb`: answer questions from a database, or change it, by SQL statements that are executed."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_choice, check_range
from slipstream.envhub.sqldb.domain import DOMAINS, NUM_ROWS, Domain, Tables, draw_tables
from slipstream.envhub.sqldb.sqldb_task import Request, draw_request
from slipstream.envhub.sqldb.sqlite_engine import Result, run_sql
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.world import Change, InvalidAction, WorldEnv, rules_in

MAX_SHOWN_ROWS = 20
MAX_SHOWN_CHARS = 2000
RULES = (
    "You have a SQLite database. `sql STATEMENT` executes one statement and shows what it returns. To answer a "
    "question, write `commit QUERY`, once: the rows that the query returns are the answer, in any order. If the task "
    "is a change, make it, then write `commit` alone."
)

_WORD_AND_REST = re.compile(r"\s*(\w+)(.*)", re.DOTALL)


class SqlState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tables: Tables


@dataclass(frozen=True, kw_only=True, slots=True)
class SqlWorld:
    opening: str
    domain: Domain
    request: Request
    first: SqlState
    right: Result  # of the correct statement: its rows answer a question, its tables are those after a change

    async def act(self, state: SqlState, action: str) -> Change[SqlState]:
        verb, statement = verb_and_rest(action)
        if verb not in ("sql", "commit"):
            raise InvalidAction("write sql STATEMENT or commit")
        if verb == "commit" and self.request.writes != (not statement):
            needs = "to end a change, write commit alone" if self.request.writes else "to answer, write commit QUERY"
            raise InvalidAction(needs)
        if verb == "commit":
            return Change(state=state, text="committed", over=True, score=float(self._is_right(state, statement)))
        result = run_sql(self.domain.schema, state.tables, statement)
        return Change(state=SqlState(tables=result.tables), text=shown_rows(result.columns, result.rows))

    def expert(self, state: SqlState) -> str:
        if not self.request.writes:
            return f"commit {self.request.sql}"
        return f"sql {self.request.sql}" if state == self.first else "commit"

    def _is_right(self, state: SqlState, query: str) -> bool:
        """Return whether the rows of `query`, in any order, or the changed tables are correct. Raises SqlError."""
        if self.request.writes:
            return state.tables == self.right.tables
        rows = run_sql(self.domain.schema, state.tables, query).rows
        return sorted(rows, key=repr) == sorted(self.right.rows, key=repr)


def make_sqldb_env(*, profile: str = "full", level: int = 1, task: str = "any") -> Env:
    """Return a `sqldb` environment. Raises ValueError for invalid options.

    `profile`: see `rules_in`. `level`: 1 (one table), 2 (aggregates and sorting) or 3 (joins). `task`: "read",
    "write" or "any".
    """
    check_choice("task", task, ("read", "write", "any"))
    check_range("level", level, 1, 3)
    return WorldEnv(
        f"sqldb {profile} level={level} task={task}",
        make_world=partial(make_sqldb, level=level, kind=task),
        rules=rules_in(profile, RULES),
    )


def make_sqldb(task: Task, *, level: int, kind: str) -> SqlWorld:
    rng = task_rng(task, world=f"sqldb/{level}/{kind}/{NUM_ROWS}")
    while True:
        domain = rng.choice(DOMAINS)
        tables = draw_tables(rng, domain)
        request = draw_request(rng, domain, tables, level=level, task=kind)
        shown_tables = [f"{table}({', '.join(columns)})" for table, columns in domain.columns.items()]
        text = "\n".join([*shown_tables, request.text])
        result = run_sql(domain.schema, tables, request.sql)
        answers = {str(cell) for row in result.rows for cell in row}
        is_empty = result.tables == tables if request.writes else answers <= {"None"}
        if is_empty or answers & set(re.findall(r"\w+", text)) or split_of(text) != task.split:
            continue
        return SqlWorld(opening=text, domain=domain, request=request, first=SqlState(tables=tables), right=result)


def verb_and_rest(action: str) -> tuple[str, str]:
    """Return the first keyword of an action in lower case, and the rest without a final semicolon.

    Both are "" if the action does not begin with a word. `strip` removes the white space: a regular expression that
    did so would backtrack for a long time on many spaces.
    """
    found = _WORD_AND_REST.fullmatch(action)
    return (found[1].lower(), found[2].strip().removesuffix(";").strip()) if found else ("", "")


def shown_rows(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """Return the result of a statement as text for the policy."""
    if not columns:
        return "done"
    lines = [" | ".join(columns), *(" | ".join(map(str, row)) for row in rows[:MAX_SHOWN_ROWS])]
    more = f"\n({len(rows) - MAX_SHOWN_ROWS} more rows)" if len(rows) > MAX_SHOWN_ROWS else ""
    return "\n".join(lines)[: MAX_SHOWN_CHARS - len(more)] + more
