"""The database: what a statement may do and cost, and which answers are correct."""

import pytest

from slipstream.envhub.sqldb.domain import DOMAINS, Tables
from slipstream.envhub.sqldb.sqldb import SqlWorld, make_sqldb, shown_rows
from slipstream.envhub.sqldb.sqlite_engine import SqlError, run_sql
from tests.envhub.env_cases import act, task_of

DOMAIN = DOMAINS[0]
TABLES: Tables = {
    "customers": ((1, "Ada", "Dover", 100), (2, "Ben", "Elgin", 200), (3, "Cleo", "Dover", 300)),
    "products": ((1, "boots", "home", 50),),
    "orders": ((1, 1, 1, 5), (2, 3, 1, 7)),
}
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "


def rows(statement: str) -> list[tuple[object, ...]]:
    return list(run_sql(DOMAIN.schema, TABLES, statement).rows)


def test_a_query_does_not_change_the_tables() -> None:
    result = run_sql(DOMAIN.schema, TABLES, "SELECT name FROM customers WHERE city = 'Dover' ORDER BY credit DESC")
    assert (result.columns, result.rows) == (("name",), [("Cleo",), ("Ada",)])
    assert result.tables is TABLES


def test_a_change_returns_new_tables_and_keeps_the_old_ones() -> None:
    result = run_sql(DOMAIN.schema, TABLES, "UPDATE customers SET credit = credit + 1 WHERE city = 'Dover'")
    assert [row[3] for row in result.tables["customers"]] == [101, 200, 301]
    assert [row[3] for row in TABLES["customers"]] == [100, 200, 300]
    assert run_sql(DOMAIN.schema, TABLES, "DELETE FROM orders WHERE id = 1").tables["orders"] == ((2, 3, 1, 7),)
    added = run_sql(DOMAIN.schema, TABLES, "INSERT INTO products VALUES (2, 'tent', 'outdoor', 9)")
    assert len(added.tables["products"]) == 2


@pytest.mark.parametrize(
    "statement",
    [
        # Files and settings.
        *("ATTACH DATABASE '/tmp/stolen.db' AS s", "VACUUM INTO '/tmp/stolen.db'", "PRAGMA writable_schema = ON"),
        *("PRAGMA max_page_count = 1000000", "SELECT * FROM pragma_database_list"),
        "SELECT load_extension('/tmp/x.so')",
        # The schema.
        *("CREATE TABLE mine(x)", "CREATE TEMP TABLE mine(x)", "DROP TABLE orders", "DELETE FROM sqlite_master"),
        *("CREATE TRIGGER t AFTER INSERT ON orders BEGIN SELECT 1; END", "ALTER TABLE orders RENAME TO o"),
        # Chance and time.
        *("SELECT random()", "SELECT * FROM customers ORDER BY random()"),
        *("SELECT datetime('now')", "SELECT CURRENT_TIMESTAMP"),
        # What is no single statement.
        *("BEGIN", "  commit ;", "SELECT 1; SELECT 2", "SELECT name FROM nowhere", ""),
        *("SELECT '" + "x" * 3000 + "'", "SELECT '\x00'", "SELECT '\ud800'"),
    ],
)
def test_a_forbidden_statement_is_refused(statement: str) -> None:
    with pytest.raises(SqlError):
        rows(statement)


def joined(names: str) -> str:
    return ", ".join(f"customers {name}" for name in names)


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        (ENDLESS + "SELECT max(i) FROM n", "too expensive"),
        (ENDLESS + "SELECT i FROM n", "more than 1000 rows"),
        (ENDLESS + "INSERT INTO products SELECT i + 100, 'x', 'y', 1 FROM n", "expensive|full"),
        ("SELECT zeroblob(1000000000)", "not authorized"),
        (f"SELECT group_concat(a.name || b.name || c.name) FROM {joined('abcdefgh')}", "too big"),
        ("SELECT printf('%.*c', 1000000000, 'x')", "not authorized"),
        ("SELECT replace('" + "x" * 90 + "', 'x', '" + "y" * 90 + "')", "too big"),
        (f"SELECT count(*) FROM {joined('abcdefghijklm')}", "too expensive"),
    ],
)
def test_an_expensive_statement_is_stopped(statement: str, why: str) -> None:
    with pytest.raises(SqlError, match=why):
        rows(statement)


def test_unusual_values_are_shown_and_kept() -> None:
    assert rows("SELECT CAST(x'ff' AS TEXT), x'ff', NULL, 9e999") == [("�", b"\xff", None, float("inf"))]
    changed = run_sql(DOMAIN.schema, TABLES, "UPDATE products SET price = NULL, name = CAST(x'ff' AS TEXT)").tables
    assert run_sql(DOMAIN.schema, changed, "SELECT price, name FROM products").rows == [(None, "�")]
    with pytest.raises(SqlError, match="a blob cannot be stored"):
        rows("UPDATE products SET name = x'ff'")


def test_the_number_of_hidden_rows_is_shown_however_long_the_others_are() -> None:
    text = shown_rows(("a",) * 8, [("x" * 14,) * 8] * 50)
    assert (len(text), text[-15:]) == (2000, "\n(30 more rows)")


def world(kind: str, level: int = 1, index: int = 0) -> SqlWorld:
    return make_sqldb(task_of("sqldb", index), level=level, kind=kind)


def test_an_answer_is_judged_by_its_rows_not_by_their_order_or_the_query() -> None:
    question = next(w for w in (world("read", index=index) for index in range(50)) if len(w.right.rows) > 2)
    values = [str(row[0]) for row in question.right.rows]
    turned = " UNION ALL ".join(f"SELECT '{value}'" for value in reversed(values))
    assert act(question, f"commit {turned}").score == 1.0
    assert act(question, f"commit {turned} UNION ALL SELECT '{values[0]}'").score == 0.0
    assert act(question, f"commit SELECT '{values[0]}'").score == 0.0
    wrong = act(question, "commit SELECT nothing FROM nowhere")
    assert (wrong.valid, wrong.over) == (False, False)


def test_a_change_is_judged_by_the_tables_that_it_leaves() -> None:
    change = world("write")
    assert act(change, "commit").score == 0.0
    done = act(change, f"sql {change.request.sql}").state
    assert act(change, "commit", done).score == 1.0
    more = act(change, f"sql DELETE FROM {change.domain.event}", done).state
    assert act(change, "commit", more).score == 0.0
    assert not act(change, "commit SELECT 1").valid
