"""Runs one SQL statement in SQLite, on tables in memory or on the user's file, with limits on what it may do and cost.

A statement may read and change rows. It may not attach files, or change the schema or the settings of SQLite. It may
not use the clock or random numbers either, because the same actions must get the same answers.
"""

import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.envhub.name_list import name_list
from slipstream.envhub.sqldb.domain import Schema, Tables
from slipstream.envhub.world import InvalidAction

MAX_SQL_CHARS = 2000
MAX_CELL_BYTES = 4096
MAX_PAGES = 128  # of 4 KiB each: the size of the database after rows were added
MAX_OPERATIONS = 300_000  # of SQLite's virtual machine: some tens of milliseconds
MAX_ROWS = 1000
MAX_FILE_OPERATIONS = 100_000_000  # on the user's file, of any size: some seconds
MAX_FILE_CPU_S = 30.0  # a limit of its own: one operation can compare or copy two whole cells
MAX_FILE_ROWS = 100_000
MAX_FILE_ROWS_BYTES = 64 << 20  # of all rows together, as Python objects
MAX_DECLARED_CHARS = 20_000

_CHANGES = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}
_ALLOWED = _CHANGES | {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
    sqlite3.SQLITE_TRANSACTION,  # SQLite begins one around each change; a BEGIN statement is refused by its first word
}
# Functions that return random numbers, the time, or the history of the connection. And printf and zeroblob, which make
# a huge value from one number.
_FORBIDDEN_FUNCTIONS = set(
    name_list(
        """
        random, randomblob, load_extension, date, time, datetime, julianday, strftime, unixepoch, current_date,
        current_time, current_timestamp, last_insert_rowid, changes, total_changes, fts3_tokenizer, sqlite_offset,
        printf, format, zeroblob, timediff
        """
    )
)
_CHECK_INTERVAL = 100  # operations between two checks of the cost of a query on a file
_DATES = {"date", "time", "datetime", "julianday", "strftime"}
_FORBIDDEN_WORDS = {"begin", "commit", "end", "rollback", "savepoint", "release"}


class SqlError(InvalidAction):
    """The statement is wrong, forbidden or too expensive. It changed nothing."""

    def __init__(self, why: str) -> None:
        super().__init__(f"error: {why}")
        self.why = why


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]  # may contain blobs
    tables: Tables  # after the statement


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLimits:
    """Limits on the values in a query on the user's file."""

    cell_bytes: int  # of one text or blob, also of those in the file
    like_bytes: int  # of a LIKE pattern


POLICY_LIMITS = FileLimits(cell_bytes=128 << 10, like_bytes=64)
USER_LIMITS = FileLimits(cell_bytes=16 << 20, like_bytes=50_000)


def run_sql(schema: Schema, tables: Tables, statement: str) -> Result:
    """Run `statement` on a database of `tables`. Raises SqlError."""
    if len(statement) > MAX_SQL_CHARS:
        raise SqlError(f"a statement has at most {MAX_SQL_CHARS} characters")
    words = statement.split(None, 1)
    if not words or words[0].lower().rstrip(";") in _FORBIDDEN_WORDS:
        raise SqlError("expected one statement that reads or changes rows")
    with _connected(":memory:") as connection:
        _fill(connection, schema, tables)
        cursor = connection.execute(statement)
        rows = cursor.fetchmany(MAX_ROWS + 1)
        if len(rows) > MAX_ROWS:
            raise SqlError(f"more than {MAX_ROWS} rows")
        columns = tuple(column[0] for column in cursor.description or ())
        changed = connection.total_changes > sum(map(len, tables.values()))
        return Result(columns=columns, rows=rows, tables=_dump(connection, schema) if changed else tables)


def query_file(path: Path, query: str, *, limits: FileLimits) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Run `query` on the database in a file, without changing it. Return its columns and rows. Raises SqlError."""
    with _connected(_uri(path)) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.cell_bytes)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, limits.like_bytes)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(_authorize_reading)
        budget, end_s = iter(range(MAX_FILE_OPERATIONS // _CHECK_INTERVAL)), time.thread_time() + MAX_FILE_CPU_S
        connection.set_progress_handler(lambda: next(budget, -1) < 0 or time.thread_time() > end_s, _CHECK_INTERVAL)
        cursor = connection.execute(query)
        rows = _fetched(cursor)
        return tuple(column[0] for column in cursor.description or ()), rows


@contextmanager
def _connected(database: str) -> Iterator[sqlite3.Connection]:
    """Connect to a database while the block runs. Raises SqlError for an error of SQLite."""
    try:
        with closing(sqlite3.connect(database, isolation_level=None, uri=True)) as connection:
            connection.text_factory = lambda text: text.decode(errors="replace")
            yield connection
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        raise SqlError("interrupted: too expensive" if "interrupted" in str(error) else str(error)) from None


def _uri(path: Path) -> str:
    return f"{path.resolve().as_uri()}?mode=ro&immutable=1"


def _fetched(cursor: sqlite3.Cursor) -> list[tuple[Any, ...]]:
    """Return all rows. It fetches one at a time, because even a few may not fit in memory. Raises SqlError."""
    rows: list[tuple[Any, ...]] = []
    held_bytes = 0
    for row in cursor:
        rows.append(row)
        held_bytes += sum(map(sys.getsizeof, (row, *row)))
        if len(rows) > MAX_FILE_ROWS or held_bytes > MAX_FILE_ROWS_BYTES:
            raise SqlError(f"more than {MAX_FILE_ROWS} rows, or rows of more than {MAX_FILE_ROWS_BYTES} bytes")
    return rows


def declarations(path: Path) -> list[str]:
    """Return the lines of the CREATE TABLE statements of the database in a file. Raises SqlError."""
    with _connected(_uri(path)) as connection:
        found = connection.execute(
            "SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL ORDER BY rowid"
        )
        return "\n".join(row[0] for row in found)[:MAX_DECLARED_CHARS].splitlines()


def _authorize_reading(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
    """Like `_authorize`, but without changes, and with functions of dates, which questions are about."""
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _DATES:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY if action in _CHANGES else _authorize(action, first, second, *rest)


def quoted(name: str) -> str:
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _fill(connection: sqlite3.Connection, schema: Schema, tables: Tables) -> None:
    """Make the tables, then limit what a statement may do and cost."""
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


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action not in _ALLOWED:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_DENY if action in _CHANGES and (first or "").startswith("sqlite_") else sqlite3.SQLITE_OK


def _dump(connection: sqlite3.Connection, schema: Schema) -> Tables:
    connection.set_authorizer(None)
    connection.set_progress_handler(None, 0)
    tables = {
        table: tuple(connection.execute(f"SELECT * FROM {quoted(table)} ORDER BY rowid")) for table in schema
    }  # an INTEGER PRIMARY KEY is the rowid
    if any(isinstance(cell, bytes) for rows in tables.values() for row in rows for cell in row):
        raise SqlError("a blob cannot be stored")
    return tables
