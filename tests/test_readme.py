"""What the README shows is what the repository does: its commands, its settings and its environment.

Every `slipstream up` of the docs with a file of conf/ is accepted too.
"""

import re
from pathlib import Path

import pytest

from slipstream.common.config.config import load_config
from slipstream.tools.cli.cli import VERBS, main
from tests.learner.objective.objectives import check_objective

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "README.md").read_text()
COMMANDS = [line.split("#")[0].split()[1:] for line in re.findall(r"^slipstream .*$", TEXT, re.MULTILINE)]
STARTS = ("up", "learner", "actors", "top")
STARTED = [words for words in COMMANDS if words[0] in STARTS and not words[1].startswith("--")]
UP = re.compile(r"\bslipstream up ((?:[^\n`\\]|\\\n)*)")
OF_CONF = [
    (page.name, words)
    for page in sorted((REPOSITORY / "docs").rglob("*.md"))
    for words in (found.split("#")[0].replace("\\\n", " ").split() for found in UP.findall(page.read_text()))
    if any(word.startswith("conf/") for word in words)
    and not any(word.startswith("conf/roads/") for word in words)
    and not any("my_" in word or ("=" not in word and not word.startswith("conf/")) for word in words)
]  # without files that the page makes


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(TEXT.split()) <= 650


def test_the_first_commands_can_be_typed_as_they_are() -> None:
    (section,) = re.findall(r"^## Try it.*?(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for command in block.splitlines():
        make, target = command.split("#")[0].split()
        assert make == "make" and target in targets


def test_make_gpu_check_runs_every_file_with_a_test_that_asks_for_a_device() -> None:
    lists = re.findall(r"^ON_GPU \+?:?= (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    asks = re.compile(r"^def test_\w+\([^)]*\b(device|gpu): torch\.device", re.MULTILINE)
    tests = REPOSITORY / "tests"
    asking = {str(path.relative_to(tests))[:-3] for path in tests.rglob("test_*.py") if asks.search(path.read_text())}
    assert asking == set(" ".join(lists).split())


def test_no_page_clones_a_repository_of_ours_whose_address_nobody_knows() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    found = [page.name for page in pages if re.search(r"git clone [^\n`]*slipstream", page.read_text())]
    assert found == []


def test_every_verb_and_file_of_a_command_exists() -> None:
    assert len(COMMANDS) >= 8
    assert {words[0] for words in COMMANDS} <= {verb.split()[0] for verb in VERBS}
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


@pytest.mark.parametrize(("page", "words"), OF_CONF, ids=lambda each: each if isinstance(each, str) else each[-1])
def test_every_run_that_the_docs_start_from_conf_is_accepted(page: str, words: list[str]) -> None:
    files = [str(REPOSITORY / word) for word in words if "=" not in word]
    check_objective(load_config(files[0], [word for word in words if "=" in word], presets=files[1:]))


def test_the_docs_start_runs_from_conf() -> None:
    assert {"objectives.md", "formats.md", "search.md", "environments.md"} <= {page for page, _ in OF_CONF}


def test_the_environment_is_the_one_that_the_docs_show_whole() -> None:
    snippet, _ = blocks("python")
    whole = (REPOSITORY / "docs" / "environments.md").read_text()
    lines = [line.split("  #")[0].rstrip() for line in snippet.splitlines() if line.strip()]
    assert len(lines) > 8
    assert [line for line in lines if line not in whole] == []
