"""One SQL statement on tables that are given and handed back: sqlite in memory, and no more than it is allowed.

A statement may read and change rows. It may not attach files, change the schema or the engine, or ask for the time or
for chance, as the same actions must get the same answers; and what it costs is bounded.
"""

import sqlite3
from dataclasses import dataclass
from typing import Any

from envhub.sqldb_domain import Domain, Tables

MAX_SQL_CHARS = 2000
MAX_CELL_BYTES = 4096
MAX_PAGES = 128  # of 4 KiB: the database, when rows are added
MAX_OPERATIONS = 300_000  # of sqlite's virtual machine: some tens of milliseconds
MAX_ROWS = 1000

_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_DELETE,
    sqlite3.SQLITE_TRANSACTION,  # what sqlite itself begins around a change; BEGIN is refused by its first word
}
# Those of chance, of the clock and of what the connection did before; and printf, whose width alone can cost seconds.
_FORBIDDEN_FUNCTIONS = {"random", "randomblob", "load_extension", "date", "time", "datetime", "julianday", "strftime",
                        "unixepoch", "current_date", "current_time", "current_timestamp", "last_insert_rowid",
                        "changes", "total_changes", "fts3_tokenizer", "sqlite_offset", "printf",
                        "format"}  # fmt: skip
_FORBIDDEN_WORDS = {"begin", "commit", "end", "rollback", "savepoint", "release"}


class SqlError(ValueError):
    """The statement is wrong, forbidden or too expensive; nothing has changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]  # blobs among them
    tables: Tables  # as they are now


def run_sql(domain: Domain, tables: Tables, statement: str) -> Result:
    """Do `statement` on a database of `tables`. Raises SqlError."""
    if len(statement) > MAX_SQL_CHARS:
        raise SqlError(f"a statement has at most {MAX_SQL_CHARS} characters")
    words = statement.split(None, 1)
    if not words or words[0].lower().rstrip(";") in _FORBIDDEN_WORDS:
        raise SqlError("one statement that reads or changes rows is needed")
    connection = _connect(domain, tables)
    try:
        cursor = connection.execute(statement)
        rows = cursor.fetchmany(MAX_ROWS + 1)
        if len(rows) > MAX_ROWS:
            raise SqlError(f"more than {MAX_ROWS} rows")
        columns = tuple(column[0] for column in cursor.description or ())
        changed = connection.total_changes > sum(map(len, tables.values()))
        return Result(columns=columns, rows=rows, tables=_dump(connection, domain) if changed else tables)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        why = "interrupted: too expensive" if "interrupted" in str(error) else str(error)
        raise SqlError(why) from None
    finally:
        connection.close()


def _connect(domain: Domain, tables: Tables) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.text_factory = lambda text: text.decode(errors="replace")
    connection.execute(f"PRAGMA max_page_count = {MAX_PAGES}")
    connection.execute("PRAGMA temp_store = MEMORY")
    for table, columns in domain.columns.items():
        # Texts stand in columns of texts; everything else is a whole number.
        kinds = ["TEXT" if column in ("name", domain.first.group, domain.second.group) else "INTEGER"
                 for column in columns]  # fmt: skip
        declared = [f"{column} {kind}" for column, kind in zip(columns, kinds, strict=True)]
        connection.execute(f"CREATE TABLE {table} ({declared[0]} PRIMARY KEY, {', '.join(declared[1:])})")
        marks = ", ".join("?" for _ in columns)
        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", tables[table])
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 64)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
    connection.set_authorizer(_authorize)
    budget = iter(range(MAX_OPERATIONS // 1000))
    connection.set_progress_handler(lambda: next(budget, -1) < 0, 1000)
    return connection


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action not in _ALLOWED:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    is_change = action in (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE)
    return sqlite3.SQLITE_DENY if is_change and (first or "").startswith("sqlite_") else sqlite3.SQLITE_OK


def _dump(connection: sqlite3.Connection, domain: Domain) -> Tables:
    connection.set_authorizer(None)
    connection.set_progress_handler(None, 0)
    tables = {table: tuple(connection.execute(f"SELECT * FROM {table} ORDER BY id")) for table in domain.columns}
    if any(isinstance(cell, bytes) for rows in tables.values() for row in rows for cell in row):
        raise SqlError("no column holds blobs")
    return tables
