"""What killed writers of a file or folder left is removed, and nothing of others."""

from pathlib import Path

import pytest

from slipstream.common.process.output import remove_left, whole_folder


@pytest.mark.parametrize("name", ["model", "model[1]"])
def test_a_new_folder_removes_what_writers_of_it_left_and_no_other(tmp_path: Path, name: str) -> None:
    left = tmp_path / f"{name}.abcdefgh.tmp"
    others = [tmp_path / f"model{end}.abcdefgh.tmp" for end in (".v2", "1", "x")]
    for folder in (left, *others):
        folder.mkdir()
    with whole_folder(tmp_path / name) as folder:
        (folder / "config.json").write_text("{}")
    assert {path.name for path in tmp_path.iterdir()} == {name, *(other.name for other in others)}


def test_what_writers_of_a_file_left_is_removed(tmp_path: Path) -> None:
    for name in ("a.abcdefgh.tmp", "ab.abcdefgh.tmp", "a"):
        (tmp_path / name).touch()
    remove_left(tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"ab.abcdefgh.tmp", "a"}
