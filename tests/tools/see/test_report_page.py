"""The report of a run: what its directory holds, as a page; whatever is damaged is named and hides nothing else."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slipstream.common.process.run_dir import RunDir
from slipstream.replay.records.ledger import ledger_of
from slipstream.replay.run.archive import ArchivedStep, ArchiveWriter
from slipstream.tools.cli.cli import main
from slipstream.tools.see.curves import Point, draw
from tests.common.process.test_headline import step
from tests.replay.run.test_replay_archive import group
from tests.tools.cli.verbs import Output
from tests.tools.see.test_runs import SUMMARY, make_run

COUNTS = {b"opened": b"40", b"trained": b"30", b"dropped:zero_variance": b"10", b"trajectories:inserted": b"80"}
COUNTS |= {b"trajectories:trained": b"60", b"trajectories:dropped:zero_variance": b"20"}
LEDGER = ledger_of(COUNTS | {b"expired_leases": b"3", b"failed:env_failure": b"2", b"redone_members": b"2"})
DEEP = "[" * 100_000


def make_whole_run(root: Path, name: str, *settings: str) -> RunDir:
    """A finished run of forty steps whose success rises from 0.2 to 0.8, with an archived step and a log."""
    config = make_run(root, name, age_s=60, **SUMMARY | {"ledger": LEDGER.to_dict()})
    run_dir = RunDir(root, name)
    records = [
        step(number, episodes=100, success=0.2 if number <= 20 else 0.8, reward=number / 40)
        | {"time": 1.7e9, "lag/max": 3.0, "lag/newest_mean": 0.5, "time/wait_s": 0.25, "time/forward_s": 0.5}
        | {"perf/goodput": 0.75, "mismatch/effective_sample_size": 0.99}
        for number in range(1, 41)
    ]
    for number, success in ((0, 0.0), (0, 0.1), (40, 0.9)):
        records.append({"step": number, "eval/success_sampled": success, "eval/num_tasks": 50.0})
    run_dir.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    changes = "".join(f"{section}: {{{value}}}\n" for section, value in (text.split("=", 1) for text in settings))
    run_dir.config.write_text(f"run: {{name: {name}, root: '{root}'}}\nlearner: {{steps: 40}}\n{changes}")
    archived = ArchivedStep(step=1, policy_version=1, conditions={}, groups=[group(1, run_id=config.run.name)])
    ArchiveWriter(run_dir.trajectories, name, epoch=1).append(archived)
    run_dir.log("learner").write_text("2026-01-01 00:00:00,000 WARNING slow\n2026-01-01 00:00:00,000 INFO WARNING x\n")
    return run_dir


def reported(run_dir: RunDir) -> str:
    target = run_dir.path.parent / "report.html"
    assert main(["view", str(run_dir.path), "--file", str(target), "--force"]) == 0
    return target.read_text()


def row(page: str, name: str) -> list[str]:
    (line,) = re.findall(rf"<tr><td>{re.escape(name)}</td>(.*)</tr>", page)
    return [html.unescape(cell) for cell in re.findall("<td>(.*?)</td>", line)]


def drawn(page: str) -> dict[str, ElementTree.Element]:
    figures = re.findall("<figcaption>(.*?)</figcaption>(<svg.*?</svg>)", page, re.DOTALL)
    return {caption: ElementTree.fromstring(svg) for caption, svg in figures}


def test_the_first_table_answers_the_five_questions(tmp_path: Path) -> None:
    text = reported(make_whole_run(tmp_path, "one"))
    assert row(text, "state")[0].startswith("40 of 40 steps, finished in 2 s, the last at 2023-11-14")
    assert row(text, "which side waits?")[0].startswith("neither side waits much: the learner was busy for 75%")
    learns = "yes: success 0.200 (0.16 to 0.24) of the first 400 episodes, 0.800 (0.76 to 0.84) of the last 400"
    for question, answer in (
        ("is it learning?", learns),
        ("held-out tasks", "0.100 (0.04 to 0.21) at step 0, then 0.900 (0.79 to 0.96) at step 40, of 50 tasks"),
        ("how stale is the data?", "lag 1.0 steps, 3.0 at most (target 2, limit 8); effective sample size 0.99"),
        ("what does it cost?", "$1.25"),
        ("is anything failing?", "log of learner: warning (1); 2 attempts failed: env_failure"),
    ):
        assert row(text, question) == [answer]


def test_accounts_faults_and_settings_are_listed(tmp_path: Path) -> None:
    text = reported(make_whole_run(tmp_path, "one", "optim=lr: 0.25"))
    assert row(text, "groups trained") == ["30"] and row(text, "trajectories dropped") == ["20 zero_variance"]
    assert row(text, "held-out success, final")[0].endswith("sampled, 75.0% greedy, of 4 tasks")
    assert row(text, "leases that expired") == ["3"]
    assert row(text, "attempts that failed and were redone") == ["2 env_failure"]
    assert row(text, "learner, wait") == ["33%"] and row(text, "learner, a step") == ["0.75 s"]
    assert row(text, "optim.lr")[1] == "0.25" and row(text, "learner.steps")[1] == "40"
    assert [caption.partition(":")[0] for caption in drawn(text)] == [
        "Success of all finished episodes, and of held-out tasks, with 95 % intervals",
        "Mean return of all finished episodes",
        "Lag",
        "Effective sample size",
        "Tokens a second",
        "Goodput",
    ]
    assert "What is missing" not in text


def test_the_page_needs_no_other_file_and_runs_no_script(tmp_path: Path) -> None:
    page = reported(make_whole_run(tmp_path, "one"))
    assert "default-src 'none'; style-src 'sha256-" in page and "script-src" not in page
    assert not re.search(r"<script|\son\w+=|\ssrc=|<link|url\(|style=", page)


def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    make_whole_run(tmp_path, "one", "optim=lr: 0.25")
    make_whole_run(tmp_path, "two", "optim=lr: 0.5")
    target = tmp_path / "report.html"
    assert main(["view", "one", "two", f"run.root={tmp_path}", "--file", str(target)]) == 0
    text = target.read_text()
    between = text[text.index("differ between the runs") : text.index("differ from the defaults")]
    assert row(between, "optim.lr")[1:] == ["0.25", "0.5"] and "learner" not in between
    success = next(iter(drawn(text).values()))
    names = [element.text for element in success.iter("{http://www.w3.org/2000/svg}text")]
    assert {"one: all episodes", "two: all episodes", "two: held-out, sampled"} <= set(names)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


DAMAGE: dict[str, tuple[Callable[[RunDir], object], str]] = {
    "no summary": (lambda run: run.summary.unlink(), "summary.json does not exist: the run has not finished"),
    "half a summary": (lambda run: cut(run.summary), "summary.json is damaged"),
    "a deep summary": (lambda run: run.summary.write_text(DEEP), "summary.json is damaged"),
    "a summary of another kind": (lambda run: run.summary.write_text('{"eval": 1}'), "summary.json is damaged"),
    "no config": (lambda run: run.config.unlink(), "config.yaml does not exist"),
    "a broken config": (lambda run: run.config.write_text("run: ["), "config.yaml"),
    "a cut tally, and no summary": (lambda run: (run.summary.unlink(), run.tally.write_text("{")), "tally.json"),
    "a log that is a folder": (lambda run: run.log("actors").mkdir(), "actors.log"),
    "no metrics": (lambda run: run.metrics.unlink(), "metrics.jsonl has no optimizer step"),
    "empty metrics": (lambda run: run.metrics.write_text(""), "metrics.jsonl has no optimizer step"),
    "a folder in the place of metrics": (lambda run: (run.metrics.unlink(), run.metrics.mkdir()), "metrics.jsonl"),
    "bytes in the place of metrics": (lambda run: run.metrics.write_bytes(bytes(range(256)) * 9), "no optimizer step"),
    "a cut archive": (lambda run: [cut(path) for path in run.trajectories.glob("*.bin")], "cannot be trained on"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_the_rest_is_reported(tmp_path: Path, damage: str) -> None:
    run_dir = make_whole_run(tmp_path, "one")
    spoil, named = DAMAGE[damage]
    spoil(run_dir)
    text = reported(run_dir)
    assert named in html.unescape(text[text.index("What is missing") :])
    assert ("leases that expired" if "summary" not in damage else "Goodput") in text


ODD = [
    '{"step": 41, "trained/reward": null, "lag/mean": "x", "perf/learner_busy": true}\n',
    f'{{"step": 41, "trained/reward": {"9" * 400}, "produced/success": 1e400, "produced/episodes": -5}}\n',
    '{"step": 41, "trained/reward": 0.5, "produced/success": -7.0, "produced/episodes": 1e200}\n',
    '{"step": -9, "trained/reward": 0.5}\n{"step": 3, "trained/reward": 0.5, "time": 1e299}\n',
    '{"step": 41, "trained/reward": 0.5, "time": 1e299}\n{"step": 1' + "0" * 250 + ', "trained/reward": 0.5}\n',
    '{"step": 41, "eval/success_sampled": 9.0, "eval/num_tasks": 0.0}\n',
    '{"step": 50, "eval/success_sampled": -9.0, "eval/num_tasks": 3}\n',
    '{"step": 41, "trained/reward": 0.5, "time": 1.7e9, "lag/mean": 1e300, "lag/max": -1e300}\n{"step": 42, "tr',
]


@pytest.mark.parametrize("line", ODD)
def test_odd_numbers_in_the_metrics_end_no_report(tmp_path: Path, line: str) -> None:
    run_dir = make_whole_run(tmp_path, "one")
    with run_dir.metrics.open("a") as file:
        file.write(line)
    text = reported(run_dir)
    assert "nan" not in text and "leases that expired" in text
    for figure in drawn(text).values():
        assert "inf" not in ElementTree.tostring(figure, encoding="unicode")


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (0.2, 0.8, "yes: success"),
        (0.8, 0.2, "NO, it unlearns: success"),
        (0.5, 0.5, "no clear change: success"),
        (1.0, 1.0, "the tasks are solved: success"),
    ],
)
def test_a_solved_run_is_not_one_without_a_change(tmp_path: Path, before: float, after: float, verdict: str) -> None:
    run_dir = make_whole_run(tmp_path, "one")
    records = [step(number, episodes=50, success=before if number < 10 else after) for number in range(20)]
    run_dir.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert row(reported(run_dir), "is it learning?")[0].startswith(verdict)


def test_a_run_with_nothing_but_its_settings_gives_a_report_of_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").touch()
    text = reported(RunDir(tmp_path, "empty"))
    assert row(text, "state") == ["stopped; no step of RL was made"]
    assert "metrics.jsonl has no optimizer step" in text and "summary.json does not exist" in text


def test_a_missing_run_and_a_file_that_cannot_be_written_are_named(tmp_path: Path, refused: Output) -> None:
    run_dir = make_whole_run(tmp_path, "one")
    said = refused("view", "none", f"run.root={tmp_path}", "--file", str(tmp_path / "x.html"))
    assert f"no run 'none' under {tmp_path}/; existing runs: one" in said
    (tmp_path / "report.html").mkdir()
    assert "report.html" in refused("view", str(run_dir.path), "--file", str(tmp_path / "report.html"), "--force")
    assert main(["view", str(run_dir.path), "--file", str(tmp_path / "other.html")]) == 0
    assert row((tmp_path / "other.html").read_text(), "leases that expired") == ["3"]


HOSTILE = "<script>alert(1)</script>|`x`\n# y \x1b[2J\u202e[a](javascript:b) <img src=x onerror=c>"


def test_text_of_a_run_stays_text(tmp_path: Path) -> None:
    run_dir = make_whole_run(tmp_path, "one", "env=options: {text: " + json.dumps(HOSTILE) + "}")
    summary = json.loads(run_dir.summary.read_text())
    summary["ledger"]["dropped"] = {HOSTILE: 10}
    summary["ledger"]["failed"] = {HOSTILE: 2}
    run_dir.summary.write_text(json.dumps(summary))
    page = reported(run_dir)
    assert "dropped: &lt;script&gt;alert(1)" in page and "{&#x27;text&#x27;: &#x27;&lt;script&gt;" in page
    assert not re.search(r"<(script|img)|\x1b|\u202e|\n# y", page)


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-1e12, 1e12], [1e-9, 2e-9], [0.0, 1e300]])
def test_curves_of_any_finite_numbers_are_drawn_within_their_frame(values: list[float]) -> None:
    points = [Point(step=place, value=value, low=value, high=value) for place, value in enumerate(values)]
    tree = ElementTree.fromstring(draw({"a": points}))
    _, _, width, height = map(float, tree.get("viewBox", "").split())
    for line in tree.iter("{http://www.w3.org/2000/svg}polyline"):
        for pair in line.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width and 0 <= y <= height


def test_a_curve_begins_at_zero_and_each_point_shows_its_step_and_interval() -> None:
    tree = ElementTree.fromstring(draw({"a": [Point(step=3, value=0.5, low=0.25, high=0.75)]}))
    texts = [text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"0", "0.6", "a"} <= set(texts)
    (title,) = tree.iter("{http://www.w3.org/2000/svg}title")
    assert title.text == "a, step 3: 0.5 (0.25 to 0.75)"
