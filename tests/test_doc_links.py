"""Every relative link of README, AGENTS.md and docs/ leads to a file that is there, and to a heading in it.

docs/others.md is about other systems: it links to their files at commits, and has a date. docs/promises.md names tests.
"""

import re
from datetime import date
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "AGENTS.md", *(REPOSITORY / "docs").rglob("*.md")])
GENERATED = {"reference/config.md", "reference/verbs.md", "reference/files.md"}  # by tools/lab/docs/docs_pages.py

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
OTHERS = REPOSITORY / "docs" / "others.md"
PROMISES = (REPOSITORY / "docs" / "promises.md").read_text()
DAYS_OF_OTHERS = 90
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def links(page: Path) -> list[str]:
    """The targets of the page's links, except those of code and of other sites."""
    found = LINK.findall(CODE.sub("", page.read_text()))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The ids of the page's headings, as GitHub and MkDocs make them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ +(.+)$", prose, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r" +", "-", re.sub(r"[^\w\- ]", "", title).strip()) for title in plain}


def broken(page: Path) -> list[str]:
    wrong = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_relative_link_leads_somewhere_and_every_file_that_is_named_is_there(page: Path) -> None:
    assert broken(page) == []
    rooms = "actors|common|conf|envhub|learner|replay|tests|tools"
    named = re.findall(rf"`((?:{rooms})/[\w/]+\.(?:py|lua|yaml|sh))`", page.read_text())
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_a_link_to_a_missing_file_or_heading_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One: `two`\n[a](#one-two) [b](#three) [c](gone.md) [d](https://example.org) `[e](gone.md)`\n")
    assert broken(page) == ["#three", "gone.md"]


def nav_pages(entries: object) -> set[str]:
    match entries:
        case str():
            return {entries}
        case list():
            return {page for entry in entries for page in nav_pages(entry)}
        case dict():
            return {page for entry in entries.values() for page in nav_pages(entry)}
    raise AssertionError(entries)


def test_the_site_lists_every_page_and_no_other() -> None:
    listed = nav_pages(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"])
    written = {str(path.relative_to(REPOSITORY / "docs")) for path in (REPOSITORY / "docs").rglob("*.md")}
    assert listed == written | GENERATED


def days_old(text: str, today: date) -> int:
    """Days since the date in the first lines of a page about other systems."""
    found = re.search(r"^Looked up on (\d{4}-\d\d-\d\d)\.", "\n".join(text.splitlines()[:5]), re.MULTILINE)
    assert found, "docs/others.md must have the line `Looked up on YYYY-MM-DD.` among its first five lines"
    return (today - date.fromisoformat(found[1])).days


def unpinned(text: str) -> list[str]:
    """The links to GitHub that do not name a commit by its 40 digits."""
    found = re.findall(r"https?://(?:www\.)?github\.com/[^\s)>\]]*", text)
    return [link for link in found if not re.match(r"https://github\.com/[^/]+/[^/]+/blob/[0-9a-f]{40}/.", link)]


def test_other_systems_were_looked_up_lately() -> None:
    age = days_old(OTHERS.read_text(), date.today())
    assert age <= DAYS_OF_OTHERS, (
        f"docs/others.md was looked up {age} days ago, at most {DAYS_OF_OTHERS} are allowed: read each linked page "
        "at the newest commit of its repository, correct cells and commits, then write the day into the first lines"
    )


def test_other_systems_are_linked_at_a_commit() -> None:
    assert len(re.findall(r"github\.com", OTHERS.read_text())) > 40
    assert unpinned(OTHERS.read_text()) == []


def test_an_old_date_and_a_link_without_a_commit_are_found() -> None:
    pinned, moving = (f"https://github.com/a/b/blob/{commit}/docs/c.md" for commit in ("0a" * 20, "main"))
    text = f"# Others\n\nLooked up on 2026-11-28. After it.\n\n[d]({pinned}) [e]({moving})\n"
    assert days_old(text, date(2027, 2, 27)) == DAYS_OF_OTHERS + 1
    assert unpinned(text) == [moving]


def test_what_shows_a_promise_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PROMISES))
    assert len(named) > 25
    assert named - {path.stem for path in (REPOSITORY / "tests").rglob("test_*.py")} == set()


def test_every_promise_says_what_shows_it() -> None:
    rows = [line.split("|") for line in PROMISES.splitlines() if line.startswith("| ") and "|---" not in line]
    promises = [row for row in rows if row[1].strip() != "what goes wrong"]
    assert len(promises) > 25
    assert [row[1] for row in promises if len(row) != 6 or "test_" not in row[3]] == []
