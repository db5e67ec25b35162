"""Every test that docs/promises.md names is there, and every page that it leads to."""

import re
from pathlib import Path

PAGE = Path("docs/promises.md")


def test_what_shows_a_promise_exists() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 25
    assert named - {path.stem for path in Path("tests").rglob("test_*.py")} == set()
    assert all((PAGE.parent / page).exists() for page in re.findall(r"\]\((\w+\.md)\)", text))


def test_every_promise_says_what_shows_it() -> None:
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ") and "|---" not in line]
    promises = [row for row in rows if row[1].strip() != "what goes wrong"]
    assert len(promises) > 25
    assert [row[1] for row in promises if len(row) != 6 or "test_" not in row[3]] == []
