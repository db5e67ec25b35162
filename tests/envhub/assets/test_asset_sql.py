"""AgentBench's database tasks, BIRD and Spider, from files in their true form that are written here."""

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.envhub.assets.dbbench import _texts, is_right_answer
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import EnvError
from slipstream.envhub.sqldb import sqlite_engine
from tests.adapters.held import USUAL, acted, keeps
from tests.envhub import test_env_contract as contract
from tests.envhub.dataset.rows import write_rows
from tests.envhub.env_cases import Case

CHECKS = [
    *USUAL,
    contract.test_the_expert_solves_its_tasks,
    contract.test_a_random_policy_never_breaks_it_and_every_turn_says_what_it_earned,
]


def line(description: str, label: list[str], kind: str, rows: list[list[str]]) -> dict[str, Any]:
    columns = [{"name": "Team", "type": "TEXT"}, {"name": "Win %", "type": "INT"}]
    return {
        "description": description,
        "label": label,
        "create": {"database": "wikisql", "init": "wikisql_init.sql"},
        "table": {"table_name": "Team Results", "table_info": {"columns": columns, "rows": rows}},
        "evaluation": "",
        "example": "",
        "type": [kind],
        "heads": ["Team", "Win %"],
        "add_description": "The name of this table is Team Results, and the headers of this table are Team,Win %.",
        "source": "wikisql",
        "answer_md5": "[('21301c997c869bd65ce51b7c761d0a4f',)]",
    }


SCHOOLS = "CREATE TABLE schools (CDSCode TEXT PRIMARY KEY, `Free Meals` INTEGER, opened DATE)"
ROWS = [["Yale", "50"], ["Brown", "40"]]
LINES = [
    line("Who won half?", ["Yale"], "other", ROWS),
    line("How many teams?", ["2.0"], "counting", ROWS),
    line("Which teams are there?", ["Brown", "Yale"], "ranking", ROWS),
    line("Set Yale to 60.", ["UPDATE `Team Results` SET `Win %`='60' WHERE Team='Yale'"], "UPDATE", ROWS),
    line("Add Yale's.", ["INSERT INTO `Team Results` (`Team`, `Win %`) VALUES (\"Yale's\", '1')"], "INSERT", ROWS),
    line("No SQLite", ["UPDATE `Team Results` r JOIN x SET r.`Win %`='1'"], "UPDATE", ROWS),
]


@pytest.fixture
def dbbench(tmp_path: Path) -> dict[str, str]:
    path = write_rows(tmp_path / "standard.jsonl", LINES)
    return {"train": path, "held_out": path}


@pytest.fixture
def bird(tmp_path: Path) -> dict[str, str]:
    """BIRD's form: dev.json with SQL, evidence and difficulty, and dev_databases/DB_ID/DB_ID.sqlite."""
    folder = tmp_path / "dev_databases" / "schools"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "schools.sqlite") as connection:
        connection.execute(SCHOOLS)
        schools = [("01", 7, "1990-05-01"), ("02", 9, "1999-01-01"), ("03", 9, None)]
        connection.executemany("INSERT INTO schools VALUES (?, ?, ?)", schools)
    connection.close()
    most = "SELECT CDSCode FROM schools WHERE `Free Meals` = (SELECT MAX(`Free Meals`) FROM schools)"
    opened = "SELECT STRFTIME('%Y', opened) FROM schools WHERE CDSCode = '01'"
    names = ("question_id", "db_id", "question", "evidence", "SQL", "difficulty")
    rows = [(0, "schools", "Most free meals?", "meals = Free Meals", most, "simple")]
    rows += [(1, "schools", "Opened when?", "", opened, "moderate")]
    questions = write_rows(tmp_path / "dev.json", [dict(zip(names, row, strict=True)) for row in rows])
    return {"train": questions, "held_out": questions, "databases": str(folder.parent)}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["dbbench", "bird"])
def test_both_keep_the_contract(name: str, check: Callable[..., None], request: pytest.FixtureRequest) -> None:
    keeps(check, Case(name, 10, 0, request.getfixturevalue(name), is_spaced=False, samples=("sql SELECT 1",)))


def test_answers_are_sets_of_texts_and_one_alone_is_a_number_where_it_is_one(dbbench: dict[str, str]) -> None:
    scores = {
        (0, 'answer ["Yale"]'): 1.0,
        (0, 'answer ["yale"]'): 0.0,
        (0, 'answer ["Yale", "Brown"]'): 0.0,
        (1, "answer [2]"): 1.0,
        (1, 'answer ["2"]'): 1.0,
        (2, 'answer ["Yale", "Brown", "Yale"]'): 1.0,
        (2, "answer []"): 0.0,
    }
    for (index, action), score in scores.items():
        end = acted("dbbench", dbbench, index, [action])[-1]
        assert (end.terminated, end.score) == (True, score), action
    assert _texts("[2, 2.5]") == ["2", "2.5"]
    assert is_right_answer(["nan"], ["nan"]) and not is_right_answer(["nan"], ["2"])


def test_a_change_counts_by_the_rows_that_it_leaves_and_texts_stay_texts(dbbench: dict[str, str]) -> None:
    way = ['sql UPDATE "Team Results" SET "Win %" = \'60\' WHERE "Win %" = \'50\'', "commit"]
    shown, end = acted("dbbench", dbbench, 3, way)[1:]
    assert (shown.messages[0].content, end.score) == ("done", 1.0)
    assert acted("dbbench", dbbench, 3, ["commit"])[-1].score == 0.0
    spoiled = [way[0], "sql DELETE FROM `Team Results` WHERE Team = 'Brown'", "commit"]
    assert acted("dbbench", dbbench, 3, spoiled)[-1].score == 0.0
    assert not acted("dbbench", dbbench, 3, ['answer ["60"]'])[-1].valid_action
    assert not acted("dbbench", dbbench, 0, ["commit"])[-1].valid_action


def test_what_a_task_says_and_shows(dbbench: dict[str, str]) -> None:
    opening, shown = acted("dbbench", dbbench, 0, ["sql SELECT `Win %`, typeof(`Win %`) FROM `Team Results`"])
    assert opening.messages[1].content.splitlines() == [LINES[0]["description"], LINES[0]["add_description"]]
    assert shown.messages[0].content.splitlines()[1:] == ["50 | text", "40 | text"]


def test_changes_that_are_no_sqlite_are_left_out(dbbench: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asked = {acted("dbbench", dbbench, index, [])[0].messages[1].content.splitlines()[0] for index in range(12)}
    assert asked == {line["description"] for line in LINES[:5]}
    assert "left out 1 of 6 tasks" in caplog.text


def test_a_missing_cell_is_null_and_a_table_that_sqlite_cannot_hold_is_left_out(
    dbbench: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    held = line("Who is missing?", ["1"], "counting", [[None, "50"]])
    large = line("How large?", ["1"], "counting", [["x" * 4000, "1"]] * 200)
    path = write_rows(Path(dbbench["train"]).with_name("cells.jsonl"), [held, large])
    shown = acted("dbbench", {"train": path}, 1, ["sql SELECT Team IS NULL FROM `Team Results`"])[-1]
    assert shown.messages[0].content.splitlines()[1] == "1"
    assert "left out 1 of 2 tasks: sqlite fails on their own statement or table" in caplog.text


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (LINES[0] | {"type": []}, "line 1: type must name the kind of the task"),
        (LINES[3] | {"label": []}, "line 1: a change must have its SQL statement in label"),
        (line("Who?", ["Yale"], "other", [["Yale"]]), "line 1: each row must have 2 cells"),
    ],
)
def test_a_task_of_another_form_is_named(tmp_path: Path, asked: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_env("dbbench", {"train": write_rows(tmp_path / "rows.jsonl", [asked])})


def test_rows_are_compared_as_sets_whatever_the_query(bird: dict[str, str]) -> None:
    for query, score in (
        ("SELECT CDSCode FROM schools WHERE `Free Meals` = 9 ORDER BY 1 DESC", 1.0),
        ("SELECT '02' UNION ALL SELECT '03' UNION ALL SELECT '03'", 1.0),
        ("SELECT CDSCode FROM schools", 0.0),
        ("SELECT CDSCode, `Free Meals` FROM schools WHERE `Free Meals` = 9", 0.0),
    ):
        assert acted("bird", bird, 0, [f"commit {query};"])[-1].score == score, query


def test_a_question_comes_with_its_tables_and_its_evidence(bird: dict[str, str]) -> None:
    opening, shown = acted("bird", bird, 0, ["sql SELECT * FROM schools WHERE CDSCode = '03'"])
    assert opening.messages[1].content.splitlines() == [SCHOOLS, "Most free meals?", "meals = Free Meals"]
    assert shown.messages[0].content == "CDSCode | Free Meals | opened\n03 | 9 | None"


LONG_CELL = f"replace('{'x' * 300}', 'x', '{'x' * 330}')"  # 99,000 of them
FEW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 40) SELECT i FROM n"
REFUSED = [
    "DELETE FROM schools",
    "UPDATE schools SET opened = 1",
    "DROP TABLE schools",
    "ATTACH 'x.db' AS x",
    "PRAGMA user_version",
    "SELECT random()",
    "SELECT hex(zeroblob(100000000))",
    "SELECT * FROM nowhere",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
    f"SELECT {LONG_CELL} FROM ({FEW}), ({FEW})",
    f"SELECT max(instr({LONG_CELL} || a.i, substr({LONG_CELL}, 50000) || a.i || b.i)) FROM ({FEW}) a, ({FEW}) b",
    f"SELECT replace({LONG_CELL}, 'x', 'xx')",
    f"SELECT 'x' LIKE '{'%x' * 40}'",
]


@pytest.mark.parametrize("statement", REFUSED)
def test_the_users_database_is_only_read(bird: dict[str, str], statement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_engine, "MAX_FILE_OPERATIONS", 1_000_000)  # a fraction of a second
    monkeypatch.setattr(sqlite_engine, "MAX_FILE_CPU_S", 0.3)
    database = Path(bird["databases"]) / "schools" / "schools.sqlite"
    before = database.read_bytes()
    answer = acted("bird", bird, 0, [f"sql {statement}"])[-1]
    assert not answer.valid_action and answer.messages[0].content.startswith("error: ")
    assert database.read_bytes() == before and len(list(database.parent.iterdir())) == 1


def test_spiders_form_is_read_too_and_a_wrong_file_of_theirs_fails_the_environment(bird: dict[str, str]) -> None:
    right = {"db_id": "schools", "query": "SELECT count(*) FROM schools", "question": "How many?", "query_toks": []}
    wrong = {"db_id": "schools", "query": "SELECT count(*) FROM pupils", "question": "How many pupils?"}
    options = bird | {"train": write_rows(Path(bird["train"]).with_name("spider.json"), [right, wrong])}
    assert acted("bird", options, 0, ["commit SELECT 3"])[-1].success
    with pytest.raises(EnvError, match="the file's own query for 'How many pupils\\?' failed: no such table"):
        acted("bird", options, 1, ["commit SELECT 3"])


def test_what_is_missing_or_damaged_is_said_with_what_to_fetch_and_where(bird: dict[str, str], tmp_path: Path) -> None:
    nowhere, empty = str(tmp_path / "nowhere"), tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for name, options, why in (
        ("bird", {}, "`env.options.databases` must be set; give the folder that contains"),
        ("bird", {"databases": nowhere}, "nowhere does not exist; give the folder that contains"),
        ("bird", {"databases": bird["databases"]}, "`env.options.train` must be set; get BIRD from"),
        ("bird", bird | {"databases": str(tmp_path)}, "schools.sqlite is missing; give the folder"),
        ("dbbench", {}, "get data/dbbench/standard.jsonl"),
        ("dbbench", {"held_out": nowhere}, "`env.options.held_out`: .* does not exist"),
        ("dbbench", {"train": str(tmp_path)}, "cannot be read: Is a directory; give the path of a file"),
        ("dbbench", {"train": str(empty)}, "empty.jsonl has no lines; a line is a task"),
        ("dbbench", {"train": bird["train"]}, "dev.json, line 1: Expected `object`"),
    ):
        with pytest.raises(ValueError, match=why):
            make_env(name, options)
    (Path(bird["databases"]) / "schools/schools.sqlite").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"schools\.sqlite cannot be read: file is not a database; give the folder"):
        make_env("bird", bird)
