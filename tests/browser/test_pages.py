"""The pages of `slipstream view` in a real browser: they show a run, and run no text of it."""

import html
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.common.process.run_dir import RunDir
from slipstream.tools.viewer.marks import Mark, keep_mark
from tests.browser.pages import dom_of
from tests.common.text.small_tokenizer import END
from tests.processes import CLI, REPOSITORY, python
from tests.tools.viewer.viewed import HOSTILE, make_viewed_run

PLACES = {
    "#from/0": "step 7",
    "#steps/6": "2 of 2 groups",
    "#steps/6/groups/1": "click[1] ü",
    "#steps/6/groups/1/members/1": "log-probability -0.5 ",
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_viewed_run(tmp_path_factory.mktemp("runs"), heard=HOSTILE)


@pytest.fixture(scope="module")
def served(run_dir: RunDir) -> Iterator[str]:
    """The address of `slipstream view`."""
    command = [sys.executable, *CLI, "view", str(run_dir.path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert found
        yield found[0]
        process.terminate()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def written(run_dir: RunDir) -> str:
    """The address of the file that `slipstream view --file --steps` writes."""
    target = run_dir.path.parent / "report.html"
    python(*CLI, "view", str(run_dir.path), "--file", str(target), "--steps", "6:7").check_returncode()
    return target.as_uri()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["served", "written"])
def test_every_page_shows_the_run_and_hostile_text_as_text(
    place: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shown = dom_of(request.getfixturevalue(kind) + place, tmp_path)
    body = shown[shown.index('<main id="main">') : shown.index("</main>")]
    text = html.unescape(re.sub(r"<[^>]*>", "", body))
    assert PLACES[place] in body and 'class="error"' not in body
    assert "<title>owned" not in shown and not re.search(r"<(img|script)", body)
    assert not re.search(r"[\x1b\u202e\u2028]", text)
    if "groups" in place:
        assert r"</script><!--\u{1b}[2J\u{202e}txt\u{2028}" in text


def test_each_token_of_an_episode_is_coloured_by_its_version(served: str, tmp_path: Path) -> None:
    shown = dom_of(f"{served}#steps/6/groups/1/members/1", tmp_path)
    tokens = re.findall(
        r'<span class="token" title="version (\d+), lag (\d+),[^"]*" style="background-color: (.*?);">', shown
    )
    assert len(tokens) == len(f"click[1] ü{END}buy{END}".encode()) - 2 * (len(END) - 1)
    assert {(version, lag) for version, lag, _ in tokens} == {("3", "2"), ("7", "1")}
    assert len({colour for _, _, colour in tokens}) == 2


@pytest.mark.parametrize(
    ("colour", "told"),
    [
        ("advantage", "advantage 0.500, ratio 1.250, trained"),
        ("importance%20ratio", "ratio 2.000, at the clip: no gradient"),
        ("mask", "ratio 0.500, left out, by the mask or as too old"),
    ],
)
def test_tokens_are_coloured_by_what_the_loss_made_of_them(served: str, tmp_path: Path, colour: str, told: str) -> None:
    shown = dom_of(f"{served}#steps/6/groups/1/members/1/{colour}", tmp_path)
    tokens = re.findall(r'<span class="token" title="([^"]*)" style="background-color: (.*?);">', shown)
    assert len(tokens) == len(f"click[1] ü{END}buy{END}".encode()) - 2 * (len(END) - 1)
    assert any(told in title for title, _ in tokens)
    assert len({colour for _, colour in tokens}) == {"advantage": 1}.get(colour, 3)
    other = dom_of(f"{served}#steps/6/groups/1/members/0/{colour}", tmp_path)
    assert "what the loss made of this episode's tokens is not recorded" in other
    assert ">importance ratio</option>" not in other and "log-probability -0.5 " in other


def test_siblings_are_drawn_as_a_tree_of_what_they_did(served: str, tmp_path: Path) -> None:
    shown = dom_of(f"{served}#steps/6/groups/1/tree", tmp_path)
    assert shown.count('<ul class="tree">') == 1 and shown.count('<div class="leaf">') == 2
    assert "click[0] ü" in shown and "click[1] ü" in shown and "return 1.000" in shown


def test_what_a_person_prefers_is_shown_and_can_be_undone(served: str, run_dir: RunDir, tmp_path: Path) -> None:
    mark = Mark(step=6, group_id=1, better=1, worse=0)
    keep_mark(run_dir.preferences, mark, {"group_id": 1, "member": [1, 0]})
    shown = dom_of(f"{served}#steps/6/groups/1", tmp_path)
    assert "better than 0 <button>undo</button>" in shown and shown.count('aria-label="better than"') == 2


def test_a_search_shows_its_hits(served: str, tmp_path: Path) -> None:
    shown = dom_of(f"{served}#search/click%5B1%5D", tmp_path)
    assert "3 turns contain" in shown and shown.count("<mark>click[1]</mark>") == 3
    assert "No earlier step has it." in shown


def test_a_place_that_is_not_there_is_named(served: str, written: str, tmp_path: Path) -> None:
    assert "was not trained on group 9" in dom_of(f"{served}#steps/6/groups/9", tmp_path)
    assert "this file does not contain steps/9" in dom_of(f"{written}#steps/9", tmp_path)


@pytest.mark.parametrize("kind", ["served", "written"])
def test_the_page_opens_on_the_report(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    shown = dom_of(request.getfixturevalue(kind), tmp_path)
    assert '<article id="report"><h1>seen</h1>' in shown and '<main id="main"></main>' in shown
    assert "<svg" in shown and "In thirty seconds" in shown and "optimizer steps" in shown
    assert '<article id="report" hidden="">' in dom_of(request.getfixturevalue(kind) + "#steps/6", tmp_path)


def test_a_report_without_steps_is_shown_without_a_script(run_dir: RunDir, tmp_path: Path) -> None:
    target = tmp_path / "plain.html"
    python(*CLI, "view", str(run_dir.path), "--file", str(target)).check_returncode()
    shown = dom_of(target.as_uri(), tmp_path / "browser")
    assert "<svg" in shown and "In thirty seconds" in shown and "<script" not in shown
