"""`slipstream view`, and `report` with steps: what an archive holds, page by page; hostile text stays text."""

import asyncio
import json
import math
import os
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import held
from slipstream.common.process.run_dir import RunDir
from slipstream.learner.batch.examples import Goal
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.replay.buffer.listing import NotRecorded
from slipstream.replay.records.step_tokens import CLIPPED, LEFT_OUT, TRAINED, write_tokens
from slipstream.replay.run.archive import ArchiveWriter
from slipstream.tools.cli.cli import main
from slipstream.tools.data.fit_rows import read_samples
from slipstream.tools.data.row_files import check_writable
from slipstream.tools.see.report_page import digest
from slipstream.tools.viewer import viewer
from slipstream.tools.viewer.archive_pages import ArchivePages
from slipstream.tools.viewer.page_server import HEADERS, make_app
from slipstream.tools.viewer.viewer import viewer_page
from tests.common.text.small_tokenizer import END
from tests.tools.cli.verbs import Output
from tests.tools.viewer.viewed import HOSTILE, archived, group_of, make_viewed_run, tokens_of


def pages_of(run_dir: RunDir) -> ArchivePages:
    return ArchivePages(load_config(str(run_dir.config), []), run_dir)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_viewed_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def pages(run_dir: RunDir) -> ArchivePages:
    return pages_of(run_dir)


@pytest.fixture
def own(tmp_path: Path) -> RunDir:
    """A run that a test may change."""
    return make_viewed_run(tmp_path)


def test_the_run_lists_its_archived_steps_with_their_numbers(pages: ArchivePages) -> None:
    run = pages.page("run")
    assert (run["name"], run["env"], run["max_lag"], run["steps"]) == ("seen", "shop", 2, [6, 7])
    metrics = pages.page("metrics/7")
    assert [metrics[step]["trained/success"] for step in ("6", "7")] == [0.5, 0.5]
    assert [metrics[step]["trained/reward"] for step in ("6", "7")] == [0.25, None]
    assert [metrics[step]["produced/success"] for step in ("6", "7")] == [None, None]
    assert list(pages.page("metrics/6")) == ["6"]


def test_a_step_shows_what_it_was_trained_on(pages: ArchivePages) -> None:
    step = pages.page("steps/6")
    assert step["facts"]["num_trajectories"] == 4 and step["facts"]["trained_reward"] == 0.5
    first, second = step["groups"]
    assert (first["group_id"], second["group_id"], first["returns"]) == (1, 2, [0.0, 1.0])
    # Version 3 is two optimizer steps before 8, as 4 and 7 are the same weights.
    assert first["lag"] == 2
    solved = first["members"][1]
    assert (solved["success"], solved["rewards"], solved["num_turns"], solved["lag"]) == (True, {"task": 1.0}, 2, 2)


def test_siblings_are_shown_turn_by_turn(pages: ArchivePages) -> None:
    group = pages.page("steps/6/groups/1")
    actions = [[turn["action"] for turn in member["turns"]] for member in group["members"]]
    assert actions == [[f"click[{member}] ü{END}", f"buy{END}"] for member in range(2)]


def test_every_sampled_token_has_its_text_version_and_lag_and_what_the_loss_made_of_it(pages: ArchivePages) -> None:
    episode = pages.page("steps/6/groups/1/members/1")
    assert episode["lags"] == {"3": 2, "7": 1}
    first, last = tokens = [turn["tokens"] for turn in episode["turns"]]
    assert "".join(first["texts"]) == f"click[1] ü{END}" and "".join(last["texts"]) == f"buy{END}"
    assert first["texts"].count("") == 1  # the first of the two bytes of ü
    assert set(first["versions"]) == {3} and last["versions"] == [3] * (len(last["versions"]) - 2) + [7, 7]
    assert set(first["logprobs"]) == {-0.5} and len(first["logprobs"]) == len(first["texts"])
    names = ("ratios", "fates", "advantages")
    ratios, fates, advantages = ([value for each in tokens for value in each[name]] for name in names)
    assert ratios[0] == 2.0 and set(ratios[1:-1]) == {1.25} and ratios[-1] == 0.5
    assert (fates[0], set(fates[1:-1]), fates[-1]) == (CLIPPED, {TRAINED}, LEFT_OUT)
    assert set(advantages) == {0.5} and episode["has_loss"]
    other = pages.page("steps/6/groups/1/members/0")
    assert not other["has_loss"] and "ratios" not in other["turns"][0]["tokens"]
    assert other["loss_note"] == "what the loss made of this episode's tokens is not recorded"


@pytest.mark.parametrize("damage", [b"", b"SL", b"\x00" * 100])
def test_a_damaged_record_of_tokens_is_named_and_the_episode_is_shown(own: RunDir, damage: bytes) -> None:
    (own.tokens / "step_000006.rank_0.bin").write_bytes(damage)
    episode = pages_of(own).page("steps/6/groups/1/members/1")
    assert "step_000006.rank_0.bin is damaged" in episode["loss_note"] and episode["turns"]


def test_tokens_of_another_attempt_and_parts_that_do_not_fit_are_not_shown(own: RunDir) -> None:
    tokens = tokens_of(group_of(1, "seen", heard="red small").trajectories[1])
    (sequence,) = tokens.sequences
    parts = [[msgspec.structs.replace(sequence, **wrong)] for wrong in ({"first": 1}, {"fates": b"\x00"})]
    for changes in ({"policy_version": 5}, *({"sequences": part} for part in parts)):
        write_tokens(own.tokens, msgspec.structs.replace(tokens, **changes), step=6, rank=0)
        assert not pages_of(own).page("steps/6/groups/1/members/1")["has_loss"]


def test_a_search_finds_text_in_all_steps_newest_first(pages: ArchivePages, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pages.search("CLICK[1]", before=8)
    places = [(hit["step"], hit["group_id"], hit["member"], hit["turn"], hit["where"]) for hit in found["hits"]]
    assert places == [(step, group, 1, 0, "action") for step, group in ((7, 3), (6, 1), (6, 2))]
    assert found["next"] is None and f"click[1] ü{END}" in found["hits"][0]["excerpt"]
    assert pages.search("plain dress", before=7)["hits"][0]["where"] == "prompt"
    assert pages.search("nothing of this", before=8) == {"hits": [], "unreadable": [], "next": None}
    monkeypatch.setattr("slipstream.tools.viewer.archive_pages.MAX_HITS", 1)
    assert pages.search("click", before=8)["next"] == 7
    assert {hit["step"] for hit in pages.search("click", before=7)["hits"]} == {6}


def test_a_running_run_shows_the_steps_that_it_makes_meanwhile(own: RunDir) -> None:
    pages = pages_of(own)
    last = own.trajectories / "step_000007.epoch_1.bin"
    hidden = last.rename(last.with_suffix(".hidden"))
    assert pages.page("run")["steps"] == [6]
    hidden.rename(last)
    assert pages.page("run")["steps"] == [6, 7]


@pytest.mark.parametrize(
    "path", ["", "steps", "steps/x", "steps/8", "steps/6/groups/9", "steps/6/groups/1/members/2", "../config.yaml"]
)
def test_a_page_that_is_not_there_is_named(pages: ArchivePages, path: str) -> None:
    with pytest.raises(NotRecorded, match=r"no page|has no step 8|not trained on group 9|no member 2"):
        pages.page(path)


async def marks_sent(pages: ArchivePages, *bodies: object, **headers: str) -> list[tuple[int, Any]]:
    """The answers to marks that are sent at once, by the viewer's page unless `headers` say otherwise."""
    async with TestClient(TestServer(make_app(pages, lambda: ""))) as client:
        own = {"Origin": f"http://127.0.0.1:{client.port}"}

        async def post(body: object) -> tuple[int, Any]:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with client.post("/api/marks", data=data, headers=own | headers) as answer:
                return answer.status, await answer.json(content_type=None)

        return await asyncio.gather(*map(post, bodies))


def mark_of(better: int, worse: int, **changes: object) -> dict[str, object]:
    return {"step": 6, "group_id": 1, "better": better, "worse": worse} | changes


async def test_what_people_prefer_is_learned_from(own: RunDir) -> None:
    pages = pages_of(own)
    assert pages.page("steps/6/groups/1")["marks"] == []
    assert await marks_sent(pages, mark_of(1, 0)) == [(200, {"marks": [[1, 0]]})]
    assert await marks_sent(pages, mark_of(0, 1)) == [(200, {"marks": [[0, 1]]})]  # the last one counts
    assert await marks_sent(pages, mark_of(1, 0, group_id=2)) == [(200, {"marks": [[1, 0]]})]
    assert pages_of(own).page("steps/6/groups/1")["marks"] == [[0, 1]]
    for goal in get_args(Goal)[1:3]:  # dpo and reward
        pairs, _, left_out = read_samples(FitOptions(data=str(own.preferences), held_out=0.0), goal=goal)
        learnt = [[side.messages[side.learn_from].content.strip() for side in pair.sides] for pair in pairs]
        assert learnt == [["click[0] ü", "click[1] ü"], ["click[1] ü", "click[0] ü"]] and not left_out.total()
        assert [pair.task for pair in pairs] == ["shop/train/1", "shop/train/2"]
    assert await marks_sent(pages, mark_of(1, 0, undo=True)) == [(200, {"marks": []})]
    assert [json.loads(line)["group_id"] for line in own.preferences.read_text().splitlines()] == [2]
    assert [path.name for path in own.path.glob("preferences*")] == ["preferences.jsonl"]


async def test_two_browsers_lose_no_mark_of_each_other(own: RunDir) -> None:
    one, other = pages_of(own), pages_of(own)
    groups = [(6, 1), (6, 2), (7, 3)]
    sent = await marks_sent(one, *(mark_of(1, 0, step=step, group_id=group) for step, group in groups))
    assert [status for status, _ in sent] == [200, 200, 200]
    assert (await marks_sent(other, mark_of(0, 1, group_id=2)))[0][0] == 200  # another server of the same run
    kept = [json.loads(line) for line in own.preferences.read_text().splitlines()]
    assert {row["group_id"]: row["member"] for row in kept} == {1: [1, 0], 2: [0, 1], 3: [1, 0]}
    with held(own.preferences):
        ((status, answer),) = await marks_sent(one, mark_of(0, 1))
    assert status == 409 and "is writing" in answer["error"]


NO_MARKS: dict[str, tuple[object, dict[str, str], int, str]] = {
    "another site": (mark_of(1, 0), {"Origin": "http://evil.example"}, 403, "only the viewer's own page may mark"),
    "another port": (mark_of(1, 0), {"Origin": "http://127.0.0.1:1"}, 403, "only the viewer's own page may mark"),
    "a hidden site": (mark_of(1, 0), {"Origin": "null"}, 403, "only the viewer's own page may mark"),
    "no JSON": (b"\xff{", {}, 400, "malformed mark"),
    "no body": (b"", {}, 400, "malformed mark"),
    "a list": ([1, 0], {}, 400, "malformed mark"),
    "text for a number": (mark_of(1, 0, step="6"), {}, 400, "malformed mark"),
    "a field too many": (mark_of(1, 0, path="/etc/passwd"), {}, 400, "malformed mark"),
    "deep nesting": (b"[" * 900, {}, 400, "malformed mark"),
    "one member": (mark_of(1, 1), {}, 400, "must name two members"),
    "no such member": (mark_of(1, 2), {}, 404, "group 1 has no member 2"),
    "no such group": (mark_of(1, 0, group_id=9), {}, 404, "not trained on group 9"),
    "no such step": (mark_of(1, 0, step=-8), {}, 404, "has no step -8"),
    "a huge number": (mark_of(1, 10**40), {}, 404, "has no member 1"),
}


@pytest.mark.parametrize("mistake", NO_MARKS)
async def test_a_mark_that_is_none_is_refused_with_a_sentence(own: RunDir, mistake: str) -> None:
    body, headers, status, named = NO_MARKS[mistake]
    ((answered, answer),) = await marks_sent(pages_of(own), body, **headers)
    assert (answered, named in answer["error"]) == (status, True), answer
    assert not own.preferences.exists()


async def test_a_damaged_file_of_marks_is_named_and_kept(own: RunDir) -> None:
    own.preferences.write_text('{"group_id": 1}\n{"chosen"')
    ((status, answer),) = await marks_sent(pages_of(own), mark_of(1, 0))
    assert status == 404 and "preferences.jsonl is damaged: line 2 is not JSON" in answer["error"]
    assert own.preferences.read_text() == '{"group_id": 1}\n{"chosen"'


async def asked(pages: ArchivePages, path: str, front: str = "", **headers: str) -> tuple[int, str, dict[str, str]]:
    async with TestClient(TestServer(make_app(pages, lambda: front))) as client:
        response = await client.get(path, headers=headers)
        return response.status, await response.text(), dict(response.headers)


def ask(pages: ArchivePages, path: str, **headers: str) -> tuple[int, Any]:
    status, text, _ = asyncio.run(asked(pages, path, **headers))
    return status, json.loads(text)


def test_the_server_answers_pages_searches_and_errors_as_json(pages: ArchivePages) -> None:
    assert ask(pages, "/api/steps/6/groups/1") == (200, pages.page("steps/6/groups/1"))
    assert ask(pages, "/api/search?text=buy&before=7")[1]["hits"][0]["step"] == 6
    assert ask(pages, "/api/steps/8")[0] == 404 and "has no step 8" in ask(pages, "/api/steps/8")[1]["error"]
    for query in ("", "text=x", "text=&before=3", "text=x&before=-1", "text=x&before=²", f"before=3&text={'x' * 1001}"):
        assert ask(pages, f"/api/search?{query}")[0] == 400
    assert ask(pages, f"/api/search?text=buy&before={'9' * 40}")[0] == 200


def test_the_page_may_run_its_own_script_under_its_own_name(pages: ArchivePages, run_dir: RunDir) -> None:
    status, text, headers = asyncio.run(asked(pages, "/", front=viewer_page(run_dir.path)))
    assert status == 200 and HEADERS.items() <= headers.items()
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    body, _, script = text.partition("<script>")
    assert f"script-src {digest(script[: script.index('</script>')])}; connect-src 'self'; base-uri 'none'" in body
    assert not re.search(r"<script|\son\w+=|\ssrc=", body) and "<script" not in script
    assert body.index("In thirty seconds") < body.index('<main id="main">')
    for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil:1"):
        assert asyncio.run(asked(pages, "/api/run", Host=name))[0] == 403
    for name in ("localhost", "localhost:9", "127.0.0.1:80"):
        assert asyncio.run(asked(pages, "/api/run", Host=name))[0] == 200


def test_no_text_is_ever_parsed_as_html() -> None:
    code = re.sub(r"//.*", "", (Path(viewer.__file__).parent / "viewer.js").read_text())
    parsers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|eval\(|Function\("
    assert not re.search(parsers, code)


@pytest.fixture(scope="module")
def hostile_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hostile")
    run_dir, target = make_viewed_run(folder, heard=HOSTILE), folder / "view.html"
    assert main(["view", str(run_dir.path), "--file", str(target), "--steps", "6:7"]) == 0
    return target.read_text()


def test_one_file_holds_every_page_of_its_steps(hostile_file: str) -> None:
    (data,) = re.findall(r'<script type="application/json" id="pages">(.*?)</script>', hostile_file, re.DOTALL)
    found = json.loads(data)
    assert found["run"]["steps"] == [6, 7]
    assert {"steps/6", "steps/7/groups/3", "steps/6/groups/2/members/0", "metrics/7"} <= found.keys()
    assert len(found) == 13
    assert HOSTILE in found["steps/6/groups/1"]["members"][0]["turns"][1]["prompt"]


def test_hostile_text_in_one_file_opens_no_tag_and_only_our_script_may_run(hostile_file: str) -> None:
    assert len(re.findall(r"<script", hostile_file)) == 2 and hostile_file.count("</script>") == 2
    assert "<img" not in hostile_file and "<!--" not in hostile_file
    script = hostile_file[hostile_file.rindex("<script>") + 8 : hostile_file.rindex("</script>")]
    assert f"script-src {digest(script)}; base-uri 'none'" in hostile_file
    rest = re.sub(r"<script.*</script>", "", hostile_file, flags=re.DOTALL)
    assert not re.search(r"\ssrc=|\shref=[^#]*[:/]|\son\w+=", rest)


def test_a_damaged_step_is_named_and_the_others_are_shown(own: RunDir) -> None:
    path = own.trajectories / "step_000006.epoch_1.bin"
    path.write_bytes(path.read_bytes()[:-9])
    pages = pages_of(own)
    assert pages.page("steps/7")["facts"]["num_groups"] == 1
    status, answer = ask(pages, "/api/steps/6")
    assert status == 404 and "step_000006.epoch_1.bin cannot be trained on" in answer["error"]
    found = pages.search("click", before=8)
    assert {hit["step"] for hit in found["hits"]} == {7} and found["unreadable"] == [6]


def test_a_number_that_json_does_not_have_is_left_out(own: RunDir) -> None:
    played = group_of(3, "seen", heard="x")
    odd = [msgspec.structs.replace(each, duration_s=math.nan, started_at_s=math.inf) for each in played.trajectories]
    writer = ArchiveWriter(own.trajectories, "seen", epoch=1)
    writer.append(archived(8, msgspec.structs.replace(played, trajectories=odd)))
    status, episode = ask(pages_of(own), "/api/steps/8/groups/3/members/1")
    assert (status, episode["duration_s"], episode["started_at_s"], episode["return"]) == (200, None, None, 1.0)


WRONG = {
    "no such run": ("none", "no run 'none'"),
    "two runs": ("seen seen", "shows one run"),
    "a port that is none": ("seen --port 70000", "--port"),
    "steps that are not archived": ("seen --file x.html --steps 1:5", "has no archived step"),
    "steps that are none": ("seen --file x.html --steps all", "FIRST:LAST"),
    "a port of a file": ("seen --file x.html --port 8000", "`--port` must be left out with"),
    "steps without a file": ("seen --steps 6:7", "`--steps` must be left out without --file"),
    "steps of two runs": ("seen seen --file x.html --steps 6:7", "--steps 6:7 are of one run, got seen, seen"),
    "a file in place of a folder": (f"seen --file {__file__}/x.html", f"{__file__} is not a directory"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_named(own: RunDir, refused: Output, mistake: str) -> None:
    arguments, named = WRONG[mistake]
    assert named in refused("view", *arguments.split(), f"run.root={own.path.parent}")


def test_one_file_replaces_no_other_nor_one_of_the_run(own: RunDir, tmp_path: Path, refused: Output) -> None:
    mine, pipe, of_run = tmp_path / "mine.html", tmp_path / "pipe", own.path / "view.html"
    mine.write_text("mine")
    os.mkfifo(pipe)
    other = make_viewed_run(tmp_path / "other")
    reasons = {
        mine: "exists; choose another file, or overwrite it with --force",
        pipe: "it exists and is not a regular file",
        **dict.fromkeys((own.config, of_run, other.config), "is in the directory of the run"),
    }
    before = own.config.read_bytes()
    for target, why in reasons.items():
        said = refused("view", str(own.path), "--file", str(target))
        assert str(target) in said and why in said
        assert (main(["view", str(own.path), "--file", str(target), "--force"]) == 0) is (target == mine)
    assert mine.read_text().startswith("<!doctype html>") and pipe.is_fifo()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: it is a record of the run"):
        check_writable(other.metrics, force=True)
    assert own.config.read_bytes() == before and not of_run.exists()


def test_a_run_without_an_archive_or_a_tokenizer_is_named(own: RunDir, tmp_path: Path, refused: Output) -> None:
    moved, said = own.model.rename(tmp_path / "elsewhere"), refused("view", str(own.path))
    assert f"{own.model} is not on this host; give a copy as model.path=FOLDER" in said
    target = tmp_path / "view.html"
    assert main(["view", str(own.path), f"model.path={moved}", "--file", str(target), "--steps", "6:6"]) == 0
    ArchiveWriter(own.trajectories, "seen", epoch=1).cut_after(0)
    assert "has no step: the run has made no step yet" in refused("view", str(own.path))
