"""What the README shows is what the repository does: its commands, its settings and its environment."""

import re
from pathlib import Path

import pytest

from tools.cli import VERBS, main

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "README.md").read_text()
COMMANDS = [line.split("#")[0].split()[1:] for line in re.findall(r"^slipstream .*$", TEXT, re.MULTILINE)]
STARTED = [
    words for words in COMMANDS if words[0] in ("up", "learner", "actors", "top") and not words[1].startswith("--")
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_every_verb_and_file_of_a_command_exists() -> None:
    assert len(COMMANDS) >= 8
    assert {words[0] for words in COMMANDS} <= set(VERBS)
    configs = {word for words in COMMANDS for word in words if word.startswith("conf/")}
    assert [name for name in configs if not (REPOSITORY / name).exists()] == []


@pytest.mark.parametrize("words", STARTED, ids=" ".join)
def test_every_configuration_of_a_command_loads(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (yaml,) = blocks("yaml")
    (tmp_path / "my_run.yaml").write_text(yaml)
    (tmp_path / "conf").symlink_to(REPOSITORY / "conf")
    monkeypatch.chdir(tmp_path)
    assert main([*(word.replace("HOST", "127.0.0.1") for word in words), "--print-config"]) == 0
    assert "run:" in capsys.readouterr().out


def test_the_environment_is_the_one_that_the_docs_show_whole() -> None:
    (snippet,) = blocks("python")
    whole = (REPOSITORY / "docs" / "environments.md").read_text()
    lines = [line.split("  #")[0].rstrip() for line in snippet.splitlines() if line.strip()]
    assert len(lines) > 8
    assert [line for line in lines if line not in whole] == []
