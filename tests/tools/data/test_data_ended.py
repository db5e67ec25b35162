"""`slipstream data` after kill -9, a full disk and Ctrl-C: nothing is left of it, and no mark is paid twice."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from slipstream.tools.cli.cli import main
from tests.actors.scripted_judge import Reply, ScriptedJudge, completion
from tests.full_disk import largest_file
from tests.tools.cli.verbs import Output
from tests.tools.data.published_rows import published_rows
from tests.tools.data.test_data import as_jsonl, read, talk
from tests.tools.data.test_judge_rows import RUBRIC

OPTIONS = ("--near-duplicates=0.8", "--held-out=0.1", "--noise=0.2")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def sources(tmp_path: Path) -> str:
    """Two files of rows, of which some repeat others; `--data` names them."""
    (tmp_path / "in").mkdir()
    words = [
        talk(f"Find {n} spoons for {n}", f"look {n}", f"You see {n} plates, {n} knives in kitchen {n}", f"take {n}")
        for n in range(20)
    ]
    instruct = as_jsonl(tmp_path / "in/instruct.jsonl", [*published_rows(60, shape="instruct"), "{", *words])
    rows = [json.loads(line) for line in published_rows(90, shape="flan") if line.endswith("}")]
    table = pa.Table.from_pylist([{"id": row["id"], "conversation": row["conversation"]} for row in rows])
    pq.write_table(table, tmp_path / "in/flan.parquet")
    return f"--data={instruct},{tmp_path}/in/flan.parquet"


def ended_again_and_again(seed: int, *arguments: str) -> int:
    """Run `slipstream data` until a process of it is quicker than its end; return how many were not."""
    command = [sys.executable, "-m", "tests.tools.data.killed_data", str(seed), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert found.returncode == 0, found.stderr[-2000:]
    return int(found.stdout.split()[-1])


def test_what_kill_9_leaves_is_removed_and_the_next_call_gives_the_same_bytes(tmp_path: Path, sources: str) -> None:
    whole, often = tmp_path / "whole", tmp_path / "often"
    for folder in (whole, often):
        folder.mkdir()
    assert main(["data", f"{whole}/out.jsonl", sources, *OPTIONS]) == 0
    assert ended_again_and_again(1, f"{often}/out.jsonl", sources, *OPTIONS, "--force") >= 3
    assert files_of(often) == files_of(whole)
    assert sorted(files_of(whole)) == ["out.held-out.jsonl", "out.jsonl", "out.quarantine.jsonl"]
    assert sum(row.get("perturbed") == "noise" for row in read(whole / "out.jsonl")) > 5


def test_the_marks_of_a_judge_outlive_kill_9_and_are_paid_once(tmp_path: Path) -> None:
    def slow(request: dict[str, Any], number: int) -> Reply:
        time.sleep(0.02)
        return completion(request["messages"][-1]["content"][-5])  # the reply, a digit

    as_jsonl(tmp_path / "rows.jsonl", [talk(f"q{number}", str(number % 10)) for number in range(30)])
    arguments = [f"{tmp_path}/out.jsonl", f"--data={tmp_path}/rows.jsonl", f"--judge={tmp_path}/judge.yaml"]
    with ScriptedJudge(slow) as server:
        judge = {"part": "judge", "url": server.url, "model": "m", "rubric": RUBRIC, "max_concurrent": 1}
        (tmp_path / "judge.yaml").write_text(yaml.safe_dump({"clear": judge}))
        num_ended = ended_again_and_again(2, *arguments, "--min-mark=0.5", "--force")
    assert num_ended >= 2
    assert len(server.requests) <= 30 + num_ended, "a kill costs the answer that was under way at most"
    kept = read(tmp_path / "out.jsonl")
    assert [row["messages"][0]["content"] for row in kept] == [f"q{n}" for n in range(30) if n % 10 >= 5]
    assert all(row["marks"]["clear"] == int(row["messages"][1]["content"]) / 10 for row in kept)


def test_a_full_disk_leaves_the_files_of_an_earlier_result(tmp_path: Path, sources: str, refused: Output) -> None:
    command = ["data", f"{tmp_path}/out/out.jsonl", sources, *OPTIONS]
    (tmp_path / "out").mkdir()
    with largest_file(bytes_allowed=100_000):
        assert "free space, or choose another" in refused(*command)
    assert files_of(tmp_path / "out") == {}
    assert main(command) == 0
    whole = files_of(tmp_path / "out")
    with largest_file(bytes_allowed=100_000):
        refused(*command, "--force")
    assert files_of(tmp_path / "out") == whole
