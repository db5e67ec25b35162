"""`slipstream data --judge`: the marks of rows, what they filter, what is asked again, and what a failure costs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.tools.cli.cli import main
from tests.actors.scripted_judge import Reply, ScriptedJudge, Serve, completion, impatient, serve
from tests.tools.cli.verbs import Output
from tests.tools.data.test_data import as_jsonl, read, talk

__all__ = ["impatient", "serve"]  # fixtures

Run = Callable[..., str]
RUBRIC = {"text": "You mark answers.", "scale": [0, 10], "criteria": {"clear": "It is clear."}}


def marks_of(request: dict[str, Any], number: int) -> Reply:
    """The number that the last reply says."""
    return completion(json.loads(request["messages"][-1]["content"])["conversation"][-1]["content"])


@pytest.fixture
def server(serve: Serve) -> ScriptedJudge:
    return serve(marks_of)


@pytest.fixture
def run(tmp_path: Path, server: ScriptedJudge, capsys: pytest.CaptureFixture[str]) -> Run:
    """Judges `rows.jsonl`; returns what was written to stderr, "" after success."""

    def judge(*options: str, name: str = "clear", **settings: Any) -> str:
        one = {"part": "judge", "url": server.url, "model": "m", "rubric": RUBRIC} | settings
        given = {key: value for key, value in one.items() if value is not None}
        (tmp_path / "judge.yaml").write_text(yaml.safe_dump({name: given}))
        arguments = [f"--data={tmp_path}/rows.jsonl", f"--judge={tmp_path}/judge.yaml", "--force", *options]
        code = main(["data", f"{tmp_path}/out.jsonl", *arguments])
        return capsys.readouterr().err if code else ""

    return judge


def test_rows_are_marked_and_filtered(tmp_path: Path, server: ScriptedJudge, run: Run) -> None:
    as_jsonl(tmp_path / "rows.jsonl", [talk(f"q{mark}", str(mark), success=mark > 4) for mark in (9, 2, 7, 4)])
    assert run("--min-mark=0.4") == ""
    assert [row["marks"] for row in read(tmp_path / "out.jsonl")] == [{"clear": 0.9}, {"clear": 0.7}, {"clear": 0.4}]
    assert len(server.requests) == 4
    assert not list(tmp_path.glob("*.waiting*"))


def test_nothing_is_asked_or_paid_twice(tmp_path: Path, server: ScriptedJudge, run: Run) -> None:
    as_jsonl(tmp_path / "rows.jsonl", [talk(f"q{mark}", str(mark)) for mark in range(6)])
    server.answer_by(lambda request, number: marks_of(request, number) if number < 3 else (400, {}, b"no more"))
    failed = run(max_concurrent=1)
    assert "failed: " in failed and "status 400" in failed and "the same command asks for the others" in failed
    assert not (tmp_path / "out.jsonl").exists()
    assert len(read(tmp_path / "out.marks.jsonl")) == 3
    server.answer_by(marks_of)
    asked = len(server.requests)
    assert run(max_concurrent=1) == ""
    assert len(server.requests) - asked == 3
    assert [row["marks"]["clear"] for row in read(tmp_path / "out.jsonl")] == [0, 0.1, 0.2, 0.3, 0.4, 0.5]
    asked = len(server.requests)
    assert run("--min-mark=0.3", timeout_s=9) == ""
    assert len(server.requests) == asked, "another filter and another limit need no new marks"
    assert run(rubric={**RUBRIC, "text": "Be strict."}) == ""
    assert len(server.requests) == asked + 6, "another rubric does"


def test_a_judge_with_another_name_asks_again(tmp_path: Path, server: ScriptedJudge, run: Run) -> None:
    as_jsonl(tmp_path / "rows.jsonl", [talk("q", "5")])
    assert run() == run(name="plain") == ""
    assert [row["marks"] for row in read(tmp_path / "out.jsonl")] == [{"plain": 0.5}]
    assert run() == "" and len(server.requests) == 2, "both are in the journal"


def test_a_budget_counts_over_several_calls(tmp_path: Path, server: ScriptedJudge, run: Run) -> None:
    as_jsonl(tmp_path / "rows.jsonl", [talk(f"q{mark}", str(mark)) for mark in range(6)])
    for _ in range(2):  # a new process has no new budget
        assert "max_total_tokens is 21" in run(max_concurrent=1, max_total_tokens=21)
        assert len(server.requests) == 3  # answers of 7 tokens
    assert run(max_concurrent=1, max_total_tokens=42) == ""
    assert len(server.requests) == 6


def test_a_row_without_columns_is_quarantined(tmp_path: Path, server: ScriptedJudge, run: Run) -> None:
    as_jsonl(tmp_path / "rows.jsonl", [talk("a", "5", truth="six"), talk("b", "6"), talk("c", "7", truth=None)])
    assert run(columns=["truth"]) == ""
    (row,) = read(tmp_path / "out.jsonl")
    assert "columns" not in row and row["marks"] == {"clear": 0.5}
    assert json.loads(server.requests[0]["messages"][-1]["content"])["reference"] == {"truth": "six"}
    refused = read(tmp_path / "out.quarantine.jsonl")
    assert [row["why"] for row in refused] == ["no column truth to show to the judge"] * 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"weight": 2}, "has weight, which are for rewards"),
        ({"compare": "listwise"}, "has compare, which are for rewards"),
        ({"part": "format", "url": None, "model": None, "rubric": None}, "must be judge, got"),
        ({"url": "actors", "model": None}, "must be a server's"),
        ({"rubric": {}}, "a rubric is"),
    ],
)
def test_a_judge_that_cannot_mark_rows_is_refused(tmp_path: Path, run: Run, settings: dict[str, Any], why: str) -> None:
    as_jsonl(tmp_path / "rows.jsonl", [talk("a", "5")])
    assert why in run(**settings)


def test_min_mark_without_a_judge_is_refused(tmp_path: Path, refused: Output) -> None:
    rows = as_jsonl(tmp_path / "rows.jsonl", [talk("a", "5")])
    complaint = refused("data", f"{tmp_path}/out.jsonl", f"--data={rows}", "--min-mark=0.5")
    assert "`--min-mark` has no effect without `--judge`" in complaint
