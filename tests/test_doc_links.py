"""Every relative link of README, AGENTS.md and docs/ leads to a file that is there, and to a heading in it."""

import re
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "AGENTS.md", *(REPOSITORY / "docs").rglob("*.md")])
GENERATED = {"reference/config.md", "reference/verbs.md", "reference/files.md"}  # by tools/lab/docs/docs_pages.py

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
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


def named_files(page: Path) -> set[str]:
    """The Python and Lua files that the page names with their room."""
    rooms = "actors|common|conf|envhub|learner|replay|tests|tools"
    return set(re.findall(rf"`((?:{rooms})/[\w/]+\.(?:py|lua|yaml|sh))`", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_file_that_is_named_is_there(page: Path) -> None:
    assert sorted(name for name in named_files(page) if not (REPOSITORY / name).exists()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


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
