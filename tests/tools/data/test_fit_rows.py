"""Rows of conversations: which are trained on, paired or held out, and the errors for bad rows."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.process.config_error import ConfigError
from slipstream.learner.batch.examples import Goal
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.data.fit_rows import Sample, read_samples
from tests.tools.data.test_row_formats import Row, as_jsonl, reply, said, tool, user
from tests.tools.data.test_row_formats import read as read_file

TOO_LARGE = {"prompt": "p", "completions": [{"response": "a", "score": 10**400}, {"response": "b", "score": 0}]}


def earned(group: int, value: float, *texts: str) -> Row:
    """As `slipstream replay export` writes it, in what matters here."""
    return {"messages": said("find", *texts), "return": value, "task": f"shop/train/{group}", "group_id": group}


def read(tmp_path: Path, rows: Sequence[object], *, goal: Goal, **settings: Any) -> tuple[list[Sample], dict[str, int]]:
    return read_file(as_jsonl(tmp_path / "rows.jsonl", rows), goal, **settings)


def replies(sample: Sample) -> list[list[str]]:
    after = [side.messages[side.learn_from :] for side in sample.sides]
    return [[message.content for message in side if message.role == "assistant"] for side in after]


def test_each_conversation_is_imitated_once(tmp_path: Path) -> None:
    rows = [{"messages": said("a", *texts)} for texts in (("b", "c", "d"), ("b", "c", "d"), ("e",))]
    taught, left_out = read(tmp_path, rows, goal="sft")
    assert [replies(sample) for sample in taught] == [[["b", "d"]], [["e"]]]
    assert left_out == {"identical to another row": 1}


def test_rejection_sampling_keeps_rows_with_enough_return_and_the_best_of_each_group(tmp_path: Path) -> None:
    of_groups = {1: {"a": 1.0, "b": 0.5, "c": 2.0, "g": 2.0}, 2: {"d": 0.4, "e": 0.9}, 3: {"f": 0.1}}
    rows = [earned(group, value, text) for group, values in of_groups.items() for text, value in values.items()]
    taught, left_out = read(tmp_path, rows, goal="sft", min_return=0.5, best_of_group=2)
    assert [replies(sample)[0] for sample in taught] == [["c"], ["g"], ["e"]]
    assert left_out == {"return below --min-return": 2, "not among the best of their group": 2}
    repeated = [earned(1, value, text) for text, value in (("a", 1.0), ("a", 1.0), ("b", 0.9), ("c", 0.1))]
    taught, _ = read(tmp_path, repeated, goal="sft", best_of_group=2)
    assert [replies(sample)[0] for sample in taught] == [["a"], ["b"]]


def test_a_null_is_no_task_and_no_group(tmp_path: Path) -> None:
    """As in a parquet file of rows of which only some have these columns."""
    rows = [earned(1, 1.0, "a"), earned(1, 0.0, "b")]
    nulls = [row | {"task": None, "group_id": None, "return": at} for at, row in enumerate(rows)]
    taught, left_out = read(tmp_path, [*rows, *nulls], goal="dpo")
    assert [replies(sample) for sample in taught] == [[["a"], ["b"]]]
    assert left_out == {"in a group of equal returns": 2}
    taught, _ = read(tmp_path, [row | {"group_id": None} for row in rows], goal="dpo")
    assert [sample.task for sample in taught] == ["shop/train/1"], "without a group, a task is one"


def test_rows_of_two_files_with_one_group_number_are_no_pair_where_they_answer_other_prompts(tmp_path: Path) -> None:
    def row(prompt: str, value: float, text: str) -> Row:
        return {"messages": said(prompt, text), "return": value, "group_id": 0}

    rows = [row("q", 1.0, "a"), row("q", 0.0, "b"), row("r", 0.5, "c"), row("r", 2.0, "d"), row("s", -1.0, "e")]
    taught, left_out = read(tmp_path, rows, goal="dpo")
    assert [replies(sample) for sample in taught] == [[["a"], ["b"]], [["d"], ["c"]]]
    assert left_out == {"in a group of equal returns": 1}


def test_a_group_whose_best_row_repeats_that_of_another_group_gives_no_worse_row(tmp_path: Path) -> None:
    """A task that is played again: its second group has the same success, and a failure that teaches nothing."""
    rows = [earned(1, 1.0, "win"), earned(1, 0.0, "lose"), earned(2, 0.0, "give up"), earned(2, 1.0, "win")]
    taught, left_out = read(tmp_path, rows, goal="sft", best_of_group=1)
    assert [replies(sample) for sample in taught] == [[["win"]]]
    assert left_out == {"not among the best of their group": 2, "identical to another row": 1}
    again = [earned(1, 0.0, "try"), earned(1, 1.0, "try"), earned(1, 0.5, "half")]  # an environment with chance
    taught, _ = read(tmp_path, again, goal="sft", best_of_group=1)
    assert [(sample.earned, replies(sample)) for sample in taught] == [(1.0, [["try"]])]


def test_of_each_group_the_best_is_paired_with_the_worst_and_learnt_from_behind_their_fork(tmp_path: Path) -> None:
    rows = [earned(1, 0.2, "search", "hats", "click"), earned(1, 1.0, "search", "hats", "buy"), earned(1, 0.5, "leave")]
    rows += [earned(2, 0.0, "a"), earned(2, 0.0, "b"), earned(3, 1.0, "alone")]
    (pair,), left_out = read(tmp_path, rows, goal="reward")
    assert replies(pair) == [["buy"], ["click"]]
    assert [side.learn_from for side in pair.sides] == [3, 3]
    assert left_out == {"neither best nor worst of their group": 1, "in a group of equal returns": 3}


@pytest.mark.parametrize("has_prompt", [True, False])
def test_pairs_have_the_prompt_of_single_conversations(tmp_path: Path, has_prompt: bool) -> None:
    """Also what `tools` and `system` add to it; and a message with `loss: false` is not learnt from."""
    prompt = [user("q")]
    replies = [[reply(text, loss=False), *prompt, reply("end")] for text in ("a", "b")]
    extra = {"tools": [tool("f")], "system": "Be brief."}
    row = {"prompt": prompt, "chosen": replies[0], "rejected": replies[1]}
    if not has_prompt:
        row = {"chosen": prompt + replies[0], "rejected": prompt + replies[1]}
    (pair,), _ = read(tmp_path, [row | extra], goal="dpo")
    (single,), _ = read(tmp_path, [{"prompt": prompt, "completion": replies[0]} | extra], goal="sft")
    assert pair.sides[0] == single.sides[0]
    assert [(side.learn_from, side.unlearnt) for side in pair.sides] == [(2, {2}), (2, {2})]


def test_returns_that_differ_by_rounding_are_equal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in a group of equal returns"):
        read(tmp_path, [earned(1, 0.1 + 0.2, "a"), earned(1, 0.3, "b")], goal="dpo")


def test_what_is_held_out_is_whole_tasks_and_the_same_whatever_else_is_there(tmp_path: Path) -> None:
    """Each task is played again, as a second group of two members."""
    rows = [
        earned(task, member, f"{task} {again} {member}") | {"group_id": 1000 * again + task}
        for task in range(100)
        for again in range(2)
        for member in range(2)
    ]
    for goal, num_samples in (("sft", 4), ("reward", 2)):
        options = FitOptions(data=str(as_jsonl(tmp_path / "rows.jsonl", rows)), held_out=0.2)
        taught, held_out, _ = read_samples(options, goal=goal)
        apart = {sample.task for sample in held_out}
        assert 10 <= len(apart) <= 30 and len(held_out) == num_samples * len(apart)
        assert len({sample.group for sample in taught + held_out}) == 200
        assert not apart & {sample.task for sample in taught}
        some = FitOptions(data=str(as_jsonl(tmp_path / "some.jsonl", rows[200:])), held_out=0.2)
        _, fewer, _ = read_samples(some, goal=goal)
        assert {sample.task for sample in fewer} < apart


def test_turns_with_labels_are_read_and_those_without_are_passed_over(tmp_path: Path) -> None:
    rows = [
        {"messages": said("a", "b", "c", "d", "e", "f"), "turn_labels": [0.25, None, True]},
        {"prompt": said("a", "b", "c"), "completion": said("a", "d")[1:], "turn_labels": [0]},  # the prompt has none
    ]
    taught, _ = read(tmp_path, rows, goal="prm")
    assert [sample.sides[0].labels for sample in taught] == [((1, 0.25), (5, 1.0)), ((3, 0.0),)]


@pytest.mark.parametrize(
    ("row", "goal", "complaint"),
    [
        ({"text": "words"}, "sft", "row 2: neither `messages` nor `prompt` and `completion`, but text"),
        ({"prompt": "p", "completion": "c"}, "sft", "row 2: `completion` must be a list of messages with role and"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "sft", "row 2: a message .* must have a role .*'robot'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "sft", "row 2: a message in `messages` must have"),
        ({"messages": []}, "sft", r"row 2: `messages` must be a list of messages with role and content, got \[\]"),
        ({"chosen": said("a", "b")}, "reward", "row 2: `rejected` must be a list"),
        ({"messages": said("a", "b")}, "reward", "row 2: `return` must be a number, got None"),
        (earned(1, math.nan, "a"), "reward", "row 2: `return` must be a number, got nan"),
        (earned(1, 10**400, "a"), "reward", "row 2: `return` must be a number, got 1000"),
        (TOO_LARGE, "dpo", "row 2: `completions` must have responses with a score or overall_score, got"),
        ({"text": "words"}, "reward", "row 2: neither `chosen` and `rejected` nor `messages`, but text"),
        ({"messages": said("a", "b")}, "prm", "row 2: `turn_labels` must be .* each of the 1 messages .* got None"),
        ({"messages": said("a", "b"), "turn_labels": [1, 0]}, "prm", r"each of the 1 messages .* got \[1, 0\]"),
        ({"messages": said("a", "b"), "turn_labels": [1.5]}, "prm", "a label .* must be .* got 1.5"),
        ({"messages": said("a", "b"), "turn_labels": [math.nan]}, "prm", "a label .* must be .* got nan"),
        ({"messages": said("a", "b"), "turn_labels": ["good"]}, "prm", "a label .* must be .* got 'good'"),
        ([], "sft", "line 2 must be a JSON object, got a list"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: object, goal: Goal, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, [earned(1, 1.0, "a") | {"turn_labels": [1]}, row], goal=goal)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        *(("", "must name a file"), ("x.jsonl", "must name a file"), (".", "a file")),
        ("rows.csv", r"must end in .jsonl, .json or .parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, complaint: str) -> None:
    as_jsonl(tmp_path / "rows.csv", [])
    with pytest.raises(ConfigError, match=complaint):
        read_samples(FitOptions(data=name and str(tmp_path / name)), goal="sft")


@pytest.mark.parametrize(("goal", "name"), [("dpo", "min_return"), ("reward", "best_of_group"), ("sft", "beta")])
def test_an_option_without_effect_is_refused(tmp_path: Path, goal: Goal, name: str) -> None:
    complaint = f"`--{name.replace('_', '-')}` has no effect in `fit {goal}`, only in .*; leave it out"
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, [earned(1, 0.0, "a"), earned(1, 1.0, "b")], goal=goal, **{name: 2})


def test_nothing_to_learn_from_is_said_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no row to train on: 2 return below --min-return, 0 held out"):
        read(tmp_path, [earned(1, 0.0, "a"), earned(1, 0.2, "b")], goal="sft", min_return=0.5)
    with pytest.raises(ConfigError, match="the file is empty"):
        read(tmp_path, [], goal="sft")
