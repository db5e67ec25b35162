"""The reference pages of the site are made from the code."""

from slipstream.common.config.config import key_paths
from slipstream.tools.cli.verb_table import VERBS
from slipstream.tools.lab.docs.docs_pages import config_page, files_page, verbs_page


def test_the_page_of_files_has_each_public_class_and_function_with_its_first_line() -> None:
    lines = files_page().splitlines()
    rooms = [line for line in lines if line.startswith("## ")]
    assert rooms == [f"## {room}" for room in ("learner", "actors", "replay", "envhub", "common")]
    begin = lines.index("### `envhub/env.py`")
    section = lines[begin : begin + 10]
    assert any(line.startswith("- `Observation`: ") for line in section)
    assert not any(line.startswith("- `_") for line in lines)


def test_every_key_and_every_verb_has_its_entry() -> None:
    keys, verbs = config_page(), verbs_page()
    assert [path for path in key_paths() if f"  {path} = " not in keys] == []
    assert [name for name in VERBS if f"## slipstream {name}\n" not in verbs] == []
