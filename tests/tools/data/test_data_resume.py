"""`slipstream data` after kill -9, a full disk and Ctrl-C: it continues, and its files are those of one call."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import slipstream.tools.data.data
from slipstream.tools.cli.cli import main
from slipstream.tools.data.data_files import DataFiles, Progress
from tests.actors.scripted_judge import Reply, ScriptedJudge, completion
from tests.full_disk import largest_file
from tests.tools.cli.test_cli import own_environment  # noqa: F401 - what `main` changes in this process is undone
from tests.tools.data.published_rows import published_rows
from tests.tools.data.test_data import read, talk, written
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
    instruct = written(tmp_path / "in/instruct.jsonl", [*published_rows(60, shape="instruct"), "{", *words])
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


def test_what_kill_9_leaves_is_continued_to_the_same_bytes(tmp_path: Path, sources: str) -> None:
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

    written(tmp_path / "rows.jsonl", [talk(f"q{number}", str(number % 10)) for number in range(30)])
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


@pytest.fixture
def unfinished(
    tmp_path: Path, sources: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Leaves what a full disk leaves; returns a function that calls again and returns the code and the errors."""
    with monkeypatch.context() as patch, largest_file(bytes_allowed=100_000):
        patch.setattr(slipstream.tools.data.data, "SAVE_S", 0.0)
        assert main(["data", f"{tmp_path}/out.jsonl", sources, *OPTIONS]) == 2
    assert "free space, or choose another; the same command continues" in capsys.readouterr().err

    def again(*arguments: str) -> str:
        code = main(["data", f"{tmp_path}/out.jsonl", *(arguments or (sources, *OPTIONS))])
        return f"{code}: {capsys.readouterr().err}"

    return again


def test_a_full_disk_costs_the_time_to_free_it(tmp_path: Path, sources: str, unfinished: Callable[..., str]) -> None:
    assert not (tmp_path / "out.jsonl").exists()
    saved = msgspec.json.decode((tmp_path / "out.progress.json").read_bytes(), type=Progress)
    assert 0 < saved.counts.num_rows < 170
    assert unfinished().startswith(f"0: {tmp_path}/out.progress.json: continuing after {saved.counts.num_rows} rows")
    (tmp_path / "whole").mkdir()
    assert main(["data", f"{tmp_path}/whole/out.jsonl", sources, *OPTIONS]) == 0
    for name, content in files_of(tmp_path / "whole").items():
        assert (tmp_path / name).read_bytes() == content
    assert not list(tmp_path.glob("out.*tmp")) and not (tmp_path / "out.progress.json").exists()


def test_other_settings_and_files_are_refused(tmp_path: Path, sources: str, unfinished: Callable[..., str]) -> None:
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out.*")}
    other = unfinished(sources, *OPTIONS[:-2], "--held-out=0.2", OPTIONS[-1])
    assert "unfinished call with --held-out=0.1, and this one has --held-out=0.2; give the same to continue" in other
    assert f"or remove {tmp_path}/out.progress.json to begin again" in other
    assert "with run.seed=0, and this one has run.seed=5" in unfinished(sources, *OPTIONS, "run.seed=5")
    one = sources.partition(",")[0]
    assert "instruct.jsonl (" in unfinished(one, *OPTIONS) and "flan.parquet" in unfinished(one, *OPTIONS)
    path = tmp_path / "in/instruct.jsonl"
    kept = path.read_bytes()
    path.write_bytes(kept.replace(b"w1 ", b"w2 ", 1))
    assert "xxh3" in unfinished()
    path.write_bytes(kept)
    (tmp_path / "out.jsonl").write_text("precious")
    assert "exists; choose another file" in unfinished()
    (tmp_path / "out.jsonl").unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out.*")} == before
    assert unfinished().startswith("0: ")


def test_damage_and_another_process_are_named(tmp_path: Path, unfinished: Callable[..., str]) -> None:
    with DataFiles(tmp_path / "out.jsonl"):
        assert " is writing " in unfinished()
    half = tmp_path / "out.jsonl.tmp"
    kept = half.read_bytes()
    half.write_bytes(kept[:10])
    assert "out.jsonl.tmp is damaged: it has 10 of " in unfinished()
    half.write_bytes(kept)
    state = tmp_path / "out.progress.json"
    good = state.read_text()
    for garbage in ("", "{}", "[", good.replace('"lengths"', '"widths"'), "\0"):
        state.write_text(garbage)
        assert "out.progress.json is damaged: " in unfinished() and "remove it to begin again" in unfinished()
    state.unlink()
    assert unfinished().startswith("0: ") and not list(tmp_path.glob("out.*tmp"))
