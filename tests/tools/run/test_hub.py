"""Models by their id on the Hugging Face Hub, from its cache, without a network."""

import subprocess
from pathlib import Path

import pytest

from slipstream.tools.run.hub import local_model
from tests.tools.cli.verbs import ASCII_LOCALE, Output, slipstream

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The Hub's cache with one model of two files, as its client lays them out."""
    folder = tmp_path / "hub" / "models--maker--tiny"
    snapshot = folder / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)
    (snapshot / "config.json").write_text("{}")
    return tmp_path / "hub"


def of_cache(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The client reads its settings when it is imported, so each call is a process."""
    return slipstream(*arguments, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(cache))


@pytest.mark.parametrize("verb", ["eval", "collect rows.jsonl", "up --dry-run"])
def test_an_id_becomes_the_folder_of_its_snapshot(
    verb: str, cache: Path, refused: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cache)  # where no rows are
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = cache / "models--maker--tiny" / "snapshots" / REVISION
    for name in ("maker/tiny", f"maker/tiny@{REVISION}"):
        said = refused(*verb.split(), f"model.path={name}", "env.name=shop")
        assert f"`model.path` {snapshot} has no *.safetensors" in said


def test_the_files_of_a_model_are_read_in_utf8_whatever_the_locale_is(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).touch()
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "config.json").write_text('{"_name_or_path": "Grüße", "max_position_embeddings": 4}', encoding="utf-8")
    done = slipstream("up", "--dry-run", f"model.path={tmp_path}", "env.name=shop", **ASCII_LOCALE)
    assert done.returncode == 2 and "`model.max_tokens` must be <= 4, the context of the model" in done.stderr


def test_an_id_that_is_not_in_the_cache_is_named_with_what_to_do(cache: Path) -> None:
    for name in ("maker/other", "maker/tiny@v2"):
        done = of_cache(cache, "fit", "sft", f"model.path={name}", "--data=rows.jsonl")
        assert done.returncode == 2
        assert f"`model.path` {name} is not a folder here, and was not found on the Hugging Face Hub: " in done.stderr
        assert "outgoing traffic has been disabled" in done.stderr and "check the name" in done.stderr


@pytest.mark.parametrize("path", ["", "/models/mine", "models", "a/b/c", "../mine", "runs/missing", "there/model"])
def test_a_path_is_never_looked_up(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "model").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    assert local_model(path) == path
