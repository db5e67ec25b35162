"""One SQL statement on tables that are given and handed back: sqlite in memory, and no more than it is allowed.

A statement may read and change rows. It may not attach files, change the schema or the engine, or ask for the time or
for chance, as the same actions must get the same answers; and what it costs is bounded.
"""

import sqlite3
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envhub.sqldb.domain import Schema, Tables

MAX_SQL_CHARS = 2000
MAX_CELL_BYTES = 4096
MAX_PAGES = 128  # of 4 KiB: the database, when rows are added
MAX_OPERATIONS = 300_000  # of sqlite's virtual machine: some tens of milliseconds
MAX_ROWS = 1000
MAX_FILE_OPERATIONS = 100_000_000  # on a database of the user's, of any size: some seconds
MAX_FILE_CPU_S = 30.0  # beside the operations: one of them compares or copies as much as two cells hold
MAX_FILE_ROWS = 100_000
MAX_FILE_ROWS_BYTES = 64 << 20  # of all of them, as Python holds them
MAX_DECLARED_CHARS = 20_000

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
# Those of chance, of the clock and of what the connection did before; and printf and zeroblob, which make much of a
# number alone.
_FORBIDDEN_FUNCTIONS = {"random", "randomblob", "load_extension", "date", "time", "datetime", "julianday", "strftime",
                        "unixepoch", "current_date", "current_time", "current_timestamp", "last_insert_rowid",
                        "changes", "total_changes", "fts3_tokenizer", "sqlite_offset", "printf",
                        "format", "zeroblob"}  # fmt: skip
_OPERATIONS_A_LOOK = 100  # so many between two looks at what a query on a file has cost
_DATES = {"date", "time", "datetime", "julianday", "strftime"}
_FORBIDDEN_WORDS = {"begin", "commit", "end", "rollback", "savepoint", "release"}


class SqlError(ValueError):
    """The statement is wrong, forbidden or too expensive; nothing has changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]  # blobs among them
    tables: Tables  # as they are now


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLimits:
    """What a query on a database of the user's may hold."""

    cell_bytes: int  # of one text or blob, those of the database too
    like_bytes: int  # of a pattern


OF_A_POLICY = FileLimits(cell_bytes=128 << 10, like_bytes=64)
OF_THE_USER = FileLimits(cell_bytes=16 << 20, like_bytes=50_000)


def run_sql(schema: Schema, tables: Tables, statement: str) -> Result:
    """Do `statement` on a database of `tables`. Raises SqlError."""
    if len(statement) > MAX_SQL_CHARS:
        raise SqlError(f"a statement has at most {MAX_SQL_CHARS} characters")
    words = statement.split(None, 1)
    if not words or words[0].lower().rstrip(";") in _FORBIDDEN_WORDS:
        raise SqlError("one statement that reads or changes rows is needed")
    connection = _connect(schema, tables)
    try:
        cursor = connection.execute(statement)
        rows = cursor.fetchmany(MAX_ROWS + 1)
        if len(rows) > MAX_ROWS:
            raise SqlError(f"more than {MAX_ROWS} rows")
        columns = tuple(column[0] for column in cursor.description or ())
        changed = connection.total_changes > sum(map(len, tables.values()))
        return Result(columns=columns, rows=rows, tables=_dump(connection, schema) if changed else tables)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        why = "interrupted: too expensive" if "interrupted" in str(error) else str(error)
        raise SqlError(why) from None
    finally:
        connection.close()


def query_file(path: Path, query: str, *, limits: FileLimits) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """The columns and rows that `query` returns from the database in a file, which stays as it is. Raises SqlError."""
    connection = _opened(path)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.cell_bytes)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, limits.like_bytes)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(_authorize_reading)
        budget, end_s = iter(range(MAX_FILE_OPERATIONS // _OPERATIONS_A_LOOK)), time.thread_time() + MAX_FILE_CPU_S
        connection.set_progress_handler(lambda: next(budget, -1) < 0 or time.thread_time() > end_s, _OPERATIONS_A_LOOK)
        cursor = connection.execute(query)
        rows = _fetched(cursor)
        return tuple(column[0] for column in cursor.description or ()), rows
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        raise SqlError("interrupted: too expensive" if "interrupted" in str(error) else str(error)) from None
    finally:
        connection.close()


def _fetched(cursor: sqlite3.Cursor) -> list[tuple[Any, ...]]:
    """All rows, one by one, as few of them may be more than a machine holds. Raises SqlError."""
    rows: list[tuple[Any, ...]] = []
    held_bytes = 0
    for row in cursor:
        rows.append(row)
        held_bytes += sum(map(sys.getsizeof, (row, *row)))
        if len(rows) > MAX_FILE_ROWS or held_bytes > MAX_FILE_ROWS_BYTES:
            raise SqlError(f"more than {MAX_FILE_ROWS} rows, or {MAX_FILE_ROWS_BYTES} bytes of them")
    return rows


def declarations(path: Path) -> list[str]:
    """What the database in a file declares: its tables, as they were made."""
    connection = _opened(path)
    try:
        found = connection.execute(
            "SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL ORDER BY rowid"
        )
        return "\n".join(row[0] for row in found)[:MAX_DECLARED_CHARS].splitlines()
    finally:
        connection.close()


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    connection.text_factory = lambda text: text.decode(errors="replace")
    return connection


def _authorize_reading(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
    """As `_authorize`, without changes; dates may be reckoned, as questions are about them."""
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _DATES:
        return sqlite3.SQLITE_OK
    changes = (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE)
    return sqlite3.SQLITE_DENY if action in changes else _authorize(action, first, second, *rest)


def quoted(name: str) -> str:
    """`name` as an identifier of SQL."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _connect(schema: Schema, tables: Tables) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.text_factory = lambda text: text.decode(errors="replace")
    connection.execute(f"PRAGMA max_page_count = {MAX_PAGES}")
    connection.execute("PRAGMA temp_store = MEMORY")
    for table, columns in schema.items():
        declared = ", ".join(f"{quoted(column)} {kind}" for column, kind in columns.items())
        connection.execute(f"CREATE TABLE {quoted(table)} ({declared})")
        marks = ", ".join("?" for _ in columns)
        connection.executemany(f"INSERT INTO {quoted(table)} VALUES ({marks})", tables[table])
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


def _dump(connection: sqlite3.Connection, schema: Schema) -> Tables:
    connection.set_authorizer(None)
    connection.set_progress_handler(None, 0)
    tables = {
        table: tuple(connection.execute(f"SELECT * FROM {quoted(table)} ORDER BY rowid")) for table in schema
    }  # an INTEGER PRIMARY KEY is the rowid
    if any(isinstance(cell, bytes) for rows in tables.values() for row in rows for cell in row):
        raise SqlError("no column holds blobs")
    return tables
