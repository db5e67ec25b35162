"""`slipstream data --noise` and `--paraphrase`: copies of rows with other words and the same actions."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.tools.cli.cli import main
from slipstream.tools.data.row_noise import noisy
from tests.actors.scripted_judge import Reply, ScriptedJudge, Serve, completion, impatient, serve
from tests.tools.cli.test_cli import own_environment  # noqa: F401 - what `main` changes in this process is undone
from tests.tools.data.test_data import Row, read, talk, written

__all__ = ["impatient", "serve"]  # fixtures

CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Bern"}}\n</tool_call>'


def texts_of(request: dict[str, Any]) -> list[str]:
    found: list[str] = json.loads(request["messages"][-1]["content"])
    return found


def in_other_words(request: dict[str, Any], number: int) -> Reply:
    return completion(json.dumps([f"Well: {text}" for text in texts_of(request)]))


@pytest.fixture
def server(serve: Serve) -> ScriptedJudge:
    return serve(in_other_words)


@pytest.fixture
def run(tmp_path: Path, server: ScriptedJudge, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Has `rows` paraphrased; returns what was written to stderr, "" after success."""

    def paraphrase(rows: Sequence[Row], *options: str, **settings: Any) -> str:
        written(tmp_path / "rows.jsonl", rows)
        (tmp_path / "model.yaml").write_text(yaml.safe_dump({"url": server.url, "model": "m"} | settings))
        arguments = [f"--data={tmp_path}/rows.jsonl", f"--paraphrase={tmp_path}/model.yaml", "--force", *options]
        code = main(["data", f"{tmp_path}/out.jsonl", *arguments])
        return capsys.readouterr().err if code else ""

    return paraphrase


def replies(row: Row) -> list[str]:
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def test_noise_swaps_inner_letters_of_observations_and_of_no_word_that_the_assistant_writes() -> None:
    observed = "You are standing in the kitchen near a wooden cupboard, 1234, B07XYZ1"
    messages = talk("Find the wooden spoon please", "open cupboard", observed, "look around", observed)["messages"]
    messages = [
        {**message, "role": "system" if index == 0 else message["role"]} for index, message in enumerate(messages)
    ]
    copy = noisy(messages, share=1.0, dice=random.Random(3))
    assert copy is not None and copy == noisy(messages, share=1.0, dice=random.Random(3))
    assert [new == old for new, old in zip(copy, messages, strict=True)] == [True, True, False, True, False]
    for new, old in zip(copy[2]["content"].split(), observed.split(), strict=True):
        assert sorted(new) == sorted(old) and (new[0], new[-1]) == (old[0], old[-1])
    assert "cupboard" in copy[2]["content"] and "1234, B07XYZ1" in copy[2]["content"]
    assert "standing" not in copy[2]["content"] and copy[2]["content"] != copy[4]["content"]
    assert noisy(messages, share=0.0, dice=random.Random(3)) is None
    some = [noisy(messages, share=0.2, dice=random.Random(seed)) for seed in range(200)]
    changed = sum(
        new != old
        for copy in some
        if copy
        for new, old in zip(copy[2]["content"].split(), observed.split(), strict=True)
    )
    assert 120 < changed < 200, "four words can change, each with probability 0.2 in 200 copies"


def test_noise_adds_copies_of_the_rows_that_are_kept_and_of_none_that_is_held_out(tmp_path: Path) -> None:
    rows = [talk(f"task {task}", f"go {task}", "The kitchen is closed today", "wait") for task in range(40)]
    written(tmp_path / "rows.jsonl", [*rows, talk("no observation", "done")])
    options = [f"--data={tmp_path}/rows.jsonl", "--noise=0.5", "--held-out=0.3", "--force"]
    assert main(["data", f"{tmp_path}/out.jsonl", *options]) == 0
    kept, apart = read(tmp_path / "out.jsonl"), read(tmp_path / "out.held-out.jsonl")
    copies = [row for row in kept if "perturbed" in row]
    assert apart and not any("perturbed" in row for row in apart)
    for at, row in enumerate(kept):
        if "perturbed" in row:
            assert row["source"] == kept[at - 1]["source"] and row["task"] == kept[at - 1]["task"]
            assert replies(row) == replies(kept[at - 1]) and row["messages"] != kept[at - 1]["messages"]
    card = (tmp_path / "out.md").read_text()
    assert f"| noise | {len(copies)} |" in card and "no copy: noise: nothing to change" in card
    assert main(["data", f"{tmp_path}/out.jsonl", *options, "run.seed=1"]) == 0
    assert read(tmp_path / "out.jsonl") != kept


def test_thoughts_are_rewritten_and_actions_not(tmp_path: Path, server: ScriptedJudge, run: Callable[..., str]) -> None:
    thought = "Thought: I should look at page 2.\nAction: ```click[next]```"
    spared = {"role": "assistant", "content": "Thought: A mistake it is.\nAction: ```back```", "loss": False}
    row = talk("Buy a hat", thought, "Page 2", "Action: ```buy```")
    row["messages"] += [{"role": "user", "content": "Bought"}, spared]
    assert run([row], "--action-format=react") == ""
    kept, copy = read(tmp_path / "out.jsonl")
    assert (copy["perturbed"], "perturbed" in kept) == ("paraphrase", False)
    assert kept["messages"] == row["messages"]
    assert replies(copy)[0] == "Thought: Well: I should look at page 2.\nAction: ```click[next]```"
    assert copy["messages"][2:] == row["messages"][2:]
    assert texts_of(server.requests[0]) == ["I should look at page 2."]
    assert server.requests[0]["seed"] == 0 and server.requests[0]["temperature"] == 0.7


def test_what_stands_before_a_call_is_rewritten_without_a_format(tmp_path: Path, run: Callable[..., str]) -> None:
    reply = f"<think>It may rain over there.</think>I look it up now. {CALL}"
    assert run([talk("Is it warm?", reply, "21 degrees", "It is warm, with 21 degrees.")]) == ""
    _, copy = read(tmp_path / "out.jsonl")
    first = f"<think>Well: It may rain over there.</think>Well: I look it up now. {CALL}"
    assert replies(copy) == [first, "It is warm, with 21 degrees."], "an answer is an action"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("Sure!", "the answer is no list of as many texts"),
        ('["Well: I go to page 2", "and more"]', "the answer is no list of as many texts"),
        ('["I go to page 3 now"]', "a rewrite changes a number"),
        ('["I go to page 2 now <action>buy</action>"]', "a rewrite is empty, or has markup"),
        ('[" "]', "a rewrite is empty, or has markup"),
        (json.dumps(["page 2 " * 100]), "a rewrite is too long"),
        ('["I go to page 2"]', "a rewrite changes nothing"),
    ],
)
def test_a_rewrite_that_is_not_accepted_is_counted_and_the_row_stays(
    tmp_path: Path, server: ScriptedJudge, run: Callable[..., str], answer: str, why: str
) -> None:
    server.answer_by(lambda request, number: completion(answer))
    assert run([talk("a", "I go to page 2 <action>next</action>")], "--action-format=action_tag") == ""
    assert len(read(tmp_path / "out.jsonl")) == 1
    assert f"| no copy: paraphrase: {why} | 1 |" in (tmp_path / "out.md").read_text()


def test_a_rewrite_from_which_another_action_would_be_read_is_not_accepted(
    tmp_path: Path, server: ScriptedJudge, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first_word.py").write_text(
        "from slipstream.common.text.action_format import ParsedAction\n\n\n"
        "class Shout:\n    instructions = ''\n\n"
        "    def write(self, action):\n        return f'so {action}!'\n\n"
        "    def parse(self, text):\n"
        "        loud = [word[:-1] for word in text.split() if word.endswith('!')]\n"
        "        return ParsedAction(text=loud[0] if loud else '', valid=bool(loud))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    server.answer_by(lambda request, number: completion('["Stop! This is the way"]'))
    assert run([talk("a", "this is the way so click[red]!")], "--action-format=first_word:Shout") == ""
    assert "| no copy: paraphrase: the action changes | 1 |" in (tmp_path / "out.md").read_text()


def test_a_task_is_rewritten_once_for_its_rows(tmp_path: Path, server: ScriptedJudge, run: Callable[..., str]) -> None:
    page = "Instruction: find me a red hat for 20 dollars [SEP] Search"
    rows = [talk(page, f"search[red hat] {number}") for number in range(3)]
    settings = {"rewrite": "task", "pattern": r"Instruction: (.*?) \[SEP\]"}
    assert run(rows, **settings) == ""
    kept = read(tmp_path / "out.jsonl")
    assert [row.get("perturbed") for row in kept] == [None, "paraphrase"] * 3
    assert kept[1]["messages"][0]["content"] == page.replace("find", "Well: find")
    assert len({row["task"] for row in kept}) == 1 and len(server.requests) == 1
    server.answer_by(lambda request, number: completion('["buy something to wear for 20 dollars"]'))
    assert run(rows, **settings, request={"temperature": 1}) == ""
    assert "no copy: paraphrase: a word that the actions use is lost | 3 |" in (tmp_path / "out.md").read_text()


def test_answers_are_paid_once_over_all_calls(tmp_path: Path, server: ScriptedJudge, run: Callable[..., str]) -> None:
    rows = [talk(f"q{number}", f"I think of {number} now {CALL}") for number in range(6)]
    server.answer_by(lambda request, number: in_other_words(request, 0) if number < 2 else (400, {}, b"no more"))
    failed = run(rows, max_concurrent=1)
    assert "status 400" in failed and "2 answers are in" in failed and "the same command continues there" in failed
    assert not (tmp_path / "out.jsonl").exists()
    server.answer_by(in_other_words)
    assert "max_requests is 5" in run(rows, max_concurrent=1, max_requests=5)
    assert len(server.requests) == 3 + 3, "two of the three before were answered, and are counted"
    journal = tmp_path / "out.paraphrases.jsonl"
    journal.write_bytes(journal.read_bytes()[:-5])
    assert run(rows) == ""
    assert len(server.requests) == 6 + 2, "one that was not answered, and the one that was cut off"
    assert [row.get("perturbed") for row in read(tmp_path / "out.jsonl")] == [None, "paraphrase"] * 6
    assert run(rows, timeout_s=9) == "" and len(server.requests) == 8
    longer = {"temperature": 0.7, "max_tokens": 9000, "seed": 0}
    assert run(rows, request=longer) == "" and len(server.requests) == 8, "answers that were not cut off stay"
    journal.write_text("garbage\n" + journal.read_text())
    assert "line 1 is damaged" in run(rows)


@pytest.mark.parametrize(
    ("options", "settings", "why"),
    [
        (["--action-format=plain"], {}, "a format with thoughts before the action"),
        (["--action-format=outcome"], {}, "a format with thoughts before the action"),
        ([], {"rewrite": "all"}, "must be thoughts or task, got 'all'"),
        ([], {"pattern": "a(b)"}, "empty with rewrite thoughts"),
        ([], {"rewrite": "task", "pattern": "ab"}, "a pattern with one group"),
        ([], {"rewrite": "task", "pattern": "a("}, "must be a regular expression"),
        ([], {"url": "actors"}, "must be a server's"),
        ([], {"url": "file:///x"}, "must be like http://host:8000/v1"),
        ([], {"model": ""}, "must be a name"),
        ([], {"rubric": "x"}, "unexpected keyword argument 'rubric'"),
        ([], {"max_cost": 3}, "give the prices"),
        ([], {"key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        (["--noise=2"], {}, "`--noise` must be in [0, 1]"),
    ],
)
def test_a_mistake_is_named(run: Callable[..., str], options: list[str], settings: dict[str, Any], why: str) -> None:
    assert why in run([talk("a", f"I look it up {CALL}")], *options, **settings)
