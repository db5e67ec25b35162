"""The command line: help, settings from files and overrides, and what every verb does with them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import key_paths
from common.connection import PASSWORD_VARIABLE
from replay.server import start_server
from tools.cli import main

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `main` changes in this process is undone after each test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(PASSWORD_VARIABLE, "none")


def test_help_lists_every_key_with_its_default_and_its_comment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    keys = [f"{path} = " for path in key_paths()]
    assert len(keys) > 60 and [key for key in keys if key not in said] == []
    assert "replay.max_lag = 4 groups with an older token than this are dropped at claim" in said
    assert "weights.host = '127.0.0.1' the publisher, or a relay, binds here" in said
    starts = sorted(said.index(key) for key in keys)
    for start, stop in zip(starts, [*starts[1:], len(said)], strict=True):
        assert len(said[start:stop].split()) > 3, f"no comment: {said[start:stop]}"


def test_the_printed_configuration_can_be_fed_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = str(REPOSITORY / "conf" / "quickstart.yaml")
    assert main(["up", quickstart, "--print-config", "learner.steps=7", "env.options.profile=full"]) == 0
    printed = capsys.readouterr().out
    assert "steps: 7" in printed and "profile: full" in printed and "groups_per_step: 8" in printed
    (tmp_path / "again.yaml").write_text(printed)
    assert main(["learner", str(tmp_path / "again.yaml"), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def test_the_printed_configuration_has_no_password(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["actors", "redis.url=redis://user:s%2Fcret@host:6379/1", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "url: redis://user@host:6379/1" in printed and "cret" not in printed
    assert os.environ[PASSWORD_VARIABLE] == "s/cret"


def test_a_dry_run_says_what_would_be_started_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "run.name=dry", "--dry-run", f"run.root={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines()] == ["redis", "learner", "actors", "tensorboard"]
    assert "redis: a server of its own" in said
    assert list(tmp_path.iterdir()) == []


def test_a_verb_about_a_run_begins_with_the_configuration_and_the_password_in_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_server(tmp_path / "mine" / "redis") as server:
        (tmp_path / "mine" / "config.yaml").write_text(
            f"run: {{name: mine, root: {tmp_path}}}\nredis: {{url: '{server.url}'}}\nlearner: {{steps: 77}}\n"
        )
        here = ["run.name=mine", f"run.root={tmp_path}"]
        assert main(["top", *here, "--print-config"]) == 0
        assert "steps: 77" in capsys.readouterr().out
        # It reaches the server, which wants a password, and finds no run there yet.
        assert main(["top", *here]) == 2
        assert "`run.name` mine is not on this Redis server; it knows no run" in capsys.readouterr().err


def test_doctor_finds_nothing_missing_here_and_says_so_when_redis_does_not_answer() -> None:
    command = [sys.executable, "-m", "tools.cli", "doctor"]
    refused = subprocess.run(
        [*command, "redis.url=redis://127.0.0.1:1"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert "redis: MISSING: `redis.url` redis://127.0.0.1:1 does not answer" in refused.stdout
    assert "packages: all installed" in refused.stdout
    assert "Traceback" not in refused.stderr
