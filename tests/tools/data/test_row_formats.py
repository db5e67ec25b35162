"""Rows as others publish them: what each field of a row and of a message does, and that both file formats agree."""

import asyncio
import datetime
import json
import math
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Task
from slipstream.common.rows.row_source import read_lines
from slipstream.common.text.chat import Chat
from slipstream.envhub.catalogue import make_env
from slipstream.learner.batch.examples import Goal
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.cli import fit_verb
from slipstream.tools.cli.cli import main
from slipstream.tools.data.fit_rows import EQUAL_SIDES, Sample, described, read_samples
from tests.actors.tool_parsing import HERMES
from tests.common.text.sentence_piece import sentence_piece
from tests.common.text.small_tokenizer import byte_tokenizer
from tests.tools.cli.verbs import Output
from tests.tools.data.test_data import Row, as_jsonl


def user(text: Any) -> Row:
    return {"role": "user", "content": text}


def reply(content: Any, **fields: Any) -> Row:
    return {"role": "assistant", "content": content, **fields}


def human(text: str) -> Row:
    return {"from": "human", "value": text}


def gpt(text: str, **fields: Any) -> Row:
    return {"from": "gpt", "value": text, **fields}


def said(*texts: str) -> list[Row]:
    return [(user, reply)[place % 2](text) for place, text in enumerate(texts)]


def call(name: str, **arguments: Any) -> Row:
    return {"type": "function", "id": "1", "function": {"name": name, "arguments": arguments}}


def part(text: str) -> Row:
    return {"type": "text", "text": text}


def tool(name: str, **properties: Any) -> Row:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def calling(question: str, called: Row, described: Row) -> Row:
    """A row in which a call answers a question."""
    return {"messages": [user(question), reply(None, tool_calls=[called])], "tools": [described]}


def text_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def as_json(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text(json.dumps(rows, indent=1))
    return path


def as_parquet(path: Path, rows: Sequence[Row]) -> Path:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    pq.write_table(pa.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows]), path)
    return path


def read(path: Path, goal: Goal = "sft", **settings: Any) -> tuple[list[Sample], dict[str, int]]:
    taught, held_out, left_out = read_samples(FitOptions(data=str(path), held_out=0.0, **settings), goal=goal)
    assert not held_out
    return taught, {reason: number for reason, number in left_out.items() if number}


def learnt(samples: Sequence[Sample]) -> list[list[str]]:
    sides = [sample.sides[0] for sample in samples]
    return [[message.content for index, message in enumerate(side.messages) if side.is_learnt(index)] for side in sides]


SYSTEM = {"role": "system", "content": "s"}
TEXT = {"type": "string"}
ZONE = TEXT | {"enum": ["CET", "UTC"]}
THINKS = {"type": "thinking", "thinking": "hm"}
WARM = calling("warm?", call("weather", day=1), tool("weather", day={"type": "integer"}))
NO = {"response": "no", "overall_score": 2, "model": "a"}
OF_KEYS: dict[str, list[Row]] = {
    "calls and tools": [
        calling("warm?", call("weather", town="Bern", day=1), tool("weather", town=TEXT, day={"type": "number"})),
        calling("when?", call("clock", unit="h", day=1.5, zone="CET"), tool("clock", unit=TEXT, zone=ZONE)),
        calling("cold?", call("weather", day=2, town="Kiel"), tool("weather", day={"type": "number"}, town=TEXT)),
    ],
    "legacy calls and functions": [
        {
            "messages": [user(f"{name}?"), reply("", function_call={"name": name, "arguments": arguments})],
            "functions": [tool(name, **dict.fromkeys(arguments, TEXT))["function"]],
        }
        for name, arguments in (("weather", {"town": "Bern"}), ("clock", {"zone": "CET"}))
    ],
    "parts, marks and thoughts": [
        {"messages": [user("a?"), reply("b", loss=False), user("c?"), reply("d", thinking="hm")]},
        {"messages": [user("e?"), reply("f", weight=1, reasoning="so")]},
    ],
    "contents in parts": [
        {"conversations": [user([part("a")]), reply([part("b")])]},
        {"messages": [user([part("a")]), reply([THINKS, part("c")])]},
    ],
    "ShareGPT with a system": [
        {"conversations": [human("a"), gpt("b")], "system": "s"},
        {"conversations": [human("a"), gpt("c", train=False), human("a"), gpt("d")]},
    ],
    "pairs": [
        {"prompt": [user("q")], "chosen": [reply("yes")], "rejected": [reply("no")]},
        {"chosen": [user("q"), reply("yes", tool_calls=[call("f", a=1)])], "rejected": [user("q"), reply("no")]},
        {"chosen": [user("q"), reply("yes", tool_calls=[call("f", b=1)])], "rejected": [user("q"), reply("no")]},
    ],
    "a prompt, a completion and a label": [
        {"prompt": [user("q")], "completion": [reply("yes")], "label": True},
        {"prompt": [user("q")], "completion": [reply("no", tool_calls=[call("f", a=1)])], "label": False},
    ],
    "prompts and completions": [
        {"prompt": [user("q"), reply("r"), user("s")], "completion": [reply("yes")]},
        {"prompt": [user("q")], "completion": [reply(None, tool_calls=[call("f", a=1.0, b=[{"c": 2}])])]},
    ],
    "collected rows": [
        {"messages": said("a", "b"), "return": 1.0, "group_id": "1", "task": {"env": "shop", "index": 0}},
        {"messages": said("a", "c"), "return": 0.5, "group_id": "1", "task": {"env": "shop", "index": 0}},
        {"messages": said("d", "e"), "return": 1, "group_id": "2", "task": {"index": 1, "split": "train"}},
        {"messages": said("d", "f"), "return": 0, "group_id": "2", "task": {"index": 1, "split": "train"}},
    ],
    "a conversation with losses": [
        {"conversation": [SYSTEM | {"loss": None}, user("a"), reply("b", loss=True)]},
        {"conversation": [user("a") | {"loss": False}, reply("c", loss=False), user("d"), reply("e", loss=True)]},
    ],
    "labels of turns": [
        {"messages": [user("a"), reply("b")], "turn_labels": [1]},
        {"messages": [user("a"), reply("b"), user("c"), reply("d")], "turn_labels": [None, 0.5]},
    ],
    "UltraFeedback": [
        {"instruction": "q", "completions": [NO, {"response": "yes", "overall_score": 7.5}]},
        {"prompt": "q2", "chosen": [user("q2"), reply("yes")], "rejected": [user("q2"), reply("no")]},
    ],
}
GROUPED = ("a prompt, a completion and a label", "collected rows")  # two rows are a pair
# The others are for sft.
GOAL_OF = dict.fromkeys(("pairs", *GROUPED), "dpo") | {"labels of turns": "prm", "UltraFeedback": "reward"}


@pytest.mark.parametrize(
    ("tokenizer", "settings"),
    [(sentence_piece("zephyr"), []), (byte_tokenizer(HERMES), ["env.action_format=tools", "model.tool_parser=hermes"])],
    ids=["a vocabulary of SentencePiece", "tools by the template"],
)
@pytest.mark.parametrize("name", OF_KEYS)
def test_a_file_of_each_format_gives_the_same_samples_of_which_each_teaches_tokens(
    name: str, tokenizer: PreTrainedTokenizerBase, settings: list[str], tmp_path: Path
) -> None:
    goal, rows = GOAL_OF.get(name, "sft"), OF_KEYS[name]
    config = load_config(None, ["model.path=x", "model.max_tokens=2048", *settings])
    kinds = ((as_jsonl, "a.jsonl"), (as_parquet, "a.parquet"), (as_json, "a.json"), (as_jsonl, "lines.json"))
    of_files = [read(as_file(tmp_path / name, rows), goal) for as_file, name in kinds]
    samples = of_files[0][0]
    assert of_files == [(samples, {})] * 4
    assert len(samples) == len(rows) // (2 if name in GROUPED else 1)
    assert "null" not in str(samples) and "None" not in str([sample.sides for sample in samples])
    counted = Counter[str]()
    with mock.patch("slipstream.tools.run.prepare.load_tokenizer", return_value=tokenizer):
        (examples,) = fit_verb._examples(config, goal, [samples], counted, data=str(tmp_path / "a.jsonl"))
    assert not +counted and len(examples) == len(samples)
    sequences = [sequence for example in examples for side in example for sequence in side]
    assert all(sequence.loss_mask.any() for sequence in sequences)
    text = tokenizer.decode([token for sequence in sequences for token in sequence.tokens.tolist()])
    assert "null" not in text and "None" not in text


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, {"prompt": "q", "system": "s"}),
        ({}, {"prompt": [user("a"), reply("b"), user("c")]}),
        ({"prompt": "asked"}, {"asked": "q"}),
        ({"conversation": "messages"}, {"messages": [user("a"), reply("b"), user("c"), reply("d")], "system": "s"}),
        (
            {"conversation": "messages", "tools": "tools"},
            WARM | {"messages": [*WARM["messages"], user("so?"), reply("x")]},
        ),
    ],
    ids=str,
)
def test_a_file_of_each_format_gives_the_same_prompts_in_tokens(options: Row, columns: Row, tmp_path: Path) -> None:
    rows = [columns | {"answer": 5}, columns | {"answer": {"a": 1}, "more": None}, columns | {"answer": 1.5, "n": [1]}]
    if "tools" in options:
        rows[1] = rows[1] | {"tools": [tool("clock", zone=TEXT | {"enum": ["CET"]})]}
    rows = [row | {"answer": json.dumps(row["answer"])} for row in rows]  # Arrow has one type for a column

    async def prompts(path: Path) -> list[list[int]]:
        env = make_env("dataset", {"train": str(path), "held_out": str(path)} | options)
        seen = [await env.reset(Task(env="dataset", split="train", index=index)) for index in range(len(rows))]
        return [Chat(byte_tokenizer(HERMES)).open(each.messages, tools=each.tools) for each in seen]

    files = as_jsonl(tmp_path / "a.jsonl", rows), as_parquet(tmp_path / "a.parquet", rows)
    from_jsonl, from_parquet = (asyncio.run(prompts(path)) for path in files)
    assert from_parquet == from_jsonl and len(from_jsonl) == len(rows)


def test_rows_of_an_array_are_numbered_and_one_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('\ufeff [{"a": 1.0, "b": {"c": null}}, 2, {"a": "\\ud800"}, {"a": 4}]', encoding="utf-8")
    whole, number, half, last = read_lines(path)
    assert (whole.row, last.number, last.row) == ({"a": 1, "b": {}}, 4, {"a": 4})
    assert number.fault == "must be a JSON object, got a int" and "half a character" in half.fault
    path.write_text(path.read_text()[:-1])
    with pytest.raises(ConfigError, match=r"rows\.json cannot be read as a JSON array: .*; restore it from a copy"):
        list(read_lines(path))


def test_a_call_from_parquet_has_the_arguments_that_its_row_states(tmp_path: Path) -> None:
    taught, _ = read(as_parquet(tmp_path / "rows.parquet", OF_KEYS["calls and tools"]))
    assert learnt(taught) == [
        [text_of("weather", day=1, town="Bern")],
        [text_of("clock", day=1.5, unit="h", zone="CET")],
        [text_of("weather", day=2, town="Kiel")],
    ]
    assert '"properties": {"day": {"type": "number"}, "town": {"type": "string"}}' in taught[2].sides[0].tools


async def scores(path: Path, options: Row, *replies: str) -> tuple[str, float]:
    env = make_env("dataset", {"train": str(path), "held_out": str(path)} | options)
    await env.reset(Task(env="dataset", split="train", index=0))
    seen = [await env.step(each) for each in replies]
    return seen[0].messages[-1].content, sum(each.score for each in seen)


@pytest.mark.parametrize("as_file", [as_jsonl, as_parquet])
@pytest.mark.parametrize(
    "marks", [{"loss_mask": [0, 0, 0, 1]}, {"masked": [True, True, True, False]}, {"train": 0}], ids=str
)
def test_the_marks_and_the_system_of_a_row_are_read_by_every_verb(as_file: Any, marks: Row, tmp_path: Path) -> None:
    talk = {"messages": [user("a"), reply("BAD"), user("b"), reply("GOOD")], "system": "s", "answer": "x", "label": "x"}
    rows = [talk | marks, {"messages": [user("c"), reply("d")], "answer": "x"}]
    path = as_file(tmp_path / f"rows.{as_file.__name__[3:]}", rows)
    is_list = isinstance(next(iter(marks.values())), list)
    taught, left_out = read(path)
    assert learnt(taught) == [["GOOD"], ["d"]] if is_list else (learnt(taught) == [["d"]] and len(left_out) == 1)
    env = make_env("dataset", {"train": str(path), "held_out": str(path), "conversation": "messages"})
    asyncio.run(env.reset(Task(env="dataset", split="train", index=0)))
    with pytest.raises(NotImplementedError, match="message 2 after the opening is marked, not to be learned"):
        env.expert()
    path = as_file(tmp_path / f"asked.{as_file.__name__[3:]}", [{"prompt": "q", "system": "s", "answer": "x"}])
    env = make_env("dataset", {"train": str(path), "held_out": str(path)})
    seen = asyncio.run(env.reset(Task(env="dataset", split="train", index=0)))
    assert [(message.role, message.content) for message in seen.messages] == [("system", "s"), ("user", "q")]


@pytest.mark.parametrize("as_file", [as_jsonl, as_parquet])
@pytest.mark.parametrize("written", ['"town": "Bern", "day": 1', '"day": 1.0, "town": "Bern", "zone": null'])
def test_calls_are_found_and_objects_are_right_in_either_format(as_file: Any, written: str, tmp_path: Path) -> None:
    rows = [
        row | {"messages": [*row["messages"], {"role": "tool", "content": answer}], "answer": answer}
        for row, answer in zip(OF_KEYS["calls and tools"], ("21", "7", "-3"), strict=True)
    ]
    path = as_file(tmp_path / f"rows.{as_file.__name__[3:]}", rows)
    called = f'<tool_call>{{"name": "weather", "arguments": {{{written}}}}}</tool_call>'
    played = scores(path, {"conversation": "messages", "tools": "tools"}, called, "21")
    assert asyncio.run(played) == ("21", 1.0)
    objects = [{"prompt": "q", "answer": {"a": 1}}, {"prompt": "q2", "answer": {"b": 1.5, "a": None}}]
    path = as_file(tmp_path / f"objects.{as_file.__name__[3:]}", objects)
    assert asyncio.run(scores(path, {"check": "json"}, '{"a": 1}'))[1] == 1.0
    assert asyncio.run(scores(path, {"check": "json"}, '{"a": 1, "b": 2}'))[1] == 0.0


def test_a_value_that_json_lacks_is_read_as_one_or_refused_with_its_row_and_column(tmp_path: Path) -> None:
    whole = {"prompt": "q", "answer": Decimal("3.00"), "at": datetime.date(2024, 1, 2), "raw": b"text"}
    path = as_parquet(tmp_path / "rows.parquet", [whole])
    assert asyncio.run(scores(path, {"check": "number"}, "3"))[1] == 1.0
    midnight = as_parquet(tmp_path / "dates.parquet", [{"prompt": "q", "answer": datetime.datetime(2024, 1, 2)}])
    assert asyncio.run(scores(midnight, {}, "2024-01-02"))[1] == 1.0
    for value in (b"\xff", datetime.timedelta(days=1), Decimal("0.1234567890123456789")):
        name = "raw" if isinstance(value, bytes) else "more"
        path = as_parquet(tmp_path / "rows.parquet", [whole, whole | {name: value}])
        with pytest.raises(ValueError, match=rf"rows\.parquet, line 2 has a column '{name}' that cannot be read"):
            make_env("dataset", {"train": str(path), "check": "number"})
        with pytest.raises(ConfigError, match=rf"rows\.parquet, line 2 has a column '{name}'|row 1: neither"):
            read(path)


LEARNED_IF_TRUE = ("loss", "loss_mask", "weight", "train", "trainable", "training")
MARKS: list[Row] = [{name: value} for name in LEARNED_IF_TRUE for value in (False, 0, 0.0, "false", "0")]
MARKS += [{name: value} for name in ("masked", "ignore") for value in (True, 1, 1.0, "True", "yes")]
MARKS.append({"weight": 1, "train": False})


@pytest.mark.parametrize("mark", MARKS, ids=str)
def test_no_reply_is_learned_that_is_marked_in_the_format_of_others(mark: Row, tmp_path: Path) -> None:
    opposite = {name: not isinstance(value, str) and not value for name, value in list(mark.items())[-1:]}
    for who, what in (("role", "content"), ("from", "value")):
        roles = ("user", "assistant") if who == "role" else ("human", "gpt")
        said = [{who: roles[place % 2], what: text} for place, text in enumerate(("a", "BAD", "b", "GOOD"))]
        said[1] |= mark
        said[3] |= opposite if not isinstance(next(iter(mark.values())), str) else {}
        taught, _ = read(as_jsonl(tmp_path / "rows.jsonl", [{"messages": said}]))
        assert learnt(taught) == [["GOOD"]]
    marked = {"messages": [user("a"), reply("BAD")], **mark}
    taught, left_out = read(as_jsonl(tmp_path / "rows.jsonl", [marked, {"messages": [user("a"), reply("GOOD")]}]))
    assert learnt(taught) == [["GOOD"]] and sum(left_out.values()) == 1 and "not to be learned" in str(left_out)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": [user("a"), reply("b", weight=0.5)]}, "`weight` of a message must be 0, 1, .* got 0.5"),
        ({"messages": [user("a"), reply("b", loss_mask=[1, 0])]}, r"`loss_mask` of a message .* got \[1, 0\]"),
        ({"messages": [user("a"), reply("", action={"f": 1})]}, "a reply .* has no text, and `action` is not"),
        ({"messages": [user("a"), reply("<think>x</think>b", thought="y")]}, "has two thoughts"),
        ({"messages": [user("a"), reply("[THINK]x[/THINK]b", thought="y")]}, "has two thoughts"),
        ({"messages": [user("a"), reply("x</think>b", thought="y")]}, "has two thoughts"),
        ({"messages": [user("a"), reply("b", thought="c </think> d")]}, "a thought .* must have no marks"),
        ({"messages": [user("a"), reply([part("b"), THINKS])]}, "must have a role"),
        ({"messages": [user("a"), reply("b", reasoning=["c"])]}, "must have a role"),
        ({"messages": [user("a"), reply("b")], "loss_mask": [0]}, "must have 0 or 1 for each of the 2 messages"),
        ({"conversations": [user("a"), {"from": "function_call", "value": "weather"}]}, "a call must be JSON"),
        ({"prompt": "q", "chosen": [user("other"), reply("a")], "rejected": [reply("b")]}, "`chosen` begins again"),
        ({"instruction": "q", "completions": [{"response": "a"}]}, "a score or overall_score"),
        ({"preferred_output": [reply("a")]}, "`input` must have messages"),
        ({"messages": [user("a"), reply([part("b") | {"train": False}])]}, "must have a role"),
        *(
            ({"messages": [user("a"), reply("b")], name: value}, f"column `{name}` may change")
            for name, value in (("weights", [0, 1]), ("train_mask", [0.0, 0.0]), ("Loss", False), ("no_train", 1))
        ),
        *(
            ({"messages": [user("a"), reply("b", **{name: value})]}, f"`{name}` of a reply may change")
            for name, value in (
                *(("do_train", False), ("train_detail", [{"begin": 0}]), ("function_calls", ["f"]), ("label", 0)),
                *(("chain_of_thought", "f"), ("skip", True), ("is_target", False), ("hidden", True), ("include", "no")),
                ("grad", 0),
            )
        ),
        *(
            ({"messages": [user("a"), reply("b")], name: value}, f"`{name}` must be 0, 1, false or true, got")
            for name, value in (
                *(("weight", 0.5), ("loss_mask", "[0, 1]"), ("loss_mask", {"1": 0}), ("train", "reply")),
                *(("label", -1), ("label", "undesirable"), ("kto_tag", "-1")),
            )
        ),
        ({"messages": [user("a") | {"tool_calls": [call("f")]}, reply("b")]}, "only a reply can have a call"),
        ({"system": ["a"], "messages": [user("a"), reply("b")]}, r"`system` must be a text, got \['a'\]"),
        *(
            ({"messages": [user("a"), reply("", tool_calls=[{"name": "f"} | rest])]}, complaint)
            for rest, complaint in (
                ({"kwargs": {"a": 1}}, "`kwargs` of a call is not read"),
                ({"arguments": [1]}, r"arguments of a call must be an object, got \[1\]"),
                ({"arguments": '{"a": NaN}'}, "arguments of a call must be JSON"),
            )
        ),
        ({"instruction": "q", "completions": [{"response": "a", "score": math.nan}, NO]}, "a score or overall_score"),
        ({"messages": [user("<image> what?"), reply("b")], "images": ["a.png"]}, "column `images` has what is no text"),
    ],
)
def test_a_field_that_may_change_what_is_learned_is_refused(row: Row, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"row 1: .*{complaint}"):
        read(as_jsonl(tmp_path / "rows.jsonl", [row]))


def test_an_unknown_field_is_named_once_with_its_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, printed: Output
) -> None:
    others = {"conversations": [user("lost")], "label": "x", "blend": 1, "system": "other"}
    others |= {"tools": [tool("f")], "functions": [tool("g")]}
    replies = [reply(f"b{place}", mood="sad", name="x", value="c") for place in range(3)]
    rows = [{"messages": [SYSTEM, user("a"), each]} | others for each in replies]
    read(path := as_jsonl(tmp_path / "rows.jsonl", rows))
    columns = "column label (3), column blend (3), column conversations (3), column functions (3)"
    warning = f"fields of rows that are not read: column system (3), mood (3), value (3), {columns}; see docs/data.md"
    assert [record.getMessage() for record in caplog.records] == [warning]
    told = printed("data", f"{tmp_path}/out.jsonl", f"--data={path}")
    assert "\nfields that are not read: 3 column system, 3 mood, " in told


THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")
SAID = "<think>\nhm\n</think>\n\n5"
LEGACY_CALL = reply("", function_call={"name": "f", "arguments": '{"a": 1}'})
LEGACY_RESULT = {"role": "function", "name": "f", "content": "2"}
SHARED_CALL = {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}
BARE_CALL = {"from": "function_call", "value": '{"name": "f"}'}
CALLS = {"role": "tool_call", "content": '[{"name": "f"}, {"name": "g"}]'}
RESULT = {"role": "tool_response", "content": "2"}


@pytest.mark.parametrize(
    ("messages", "taught"),
    [
        *(([user("q"), reply("5", **{name: "hm"})], [SAID]) for name in THOUGHTS),
        ([user("q"), reply(SAID, reasoning_content="hm")], [SAID]),
        ([user("q"), reply([THINKS, part("5")])], [SAID]),
        ([user("q"), reply(None, thinking="hm", tool_calls=[call("f")])], [f"<think>\nhm\n</think>\n\n{text_of('f')}"]),
        ([user("q"), LEGACY_CALL, LEGACY_RESULT, reply("y")], [text_of("f", a=1), "y"]),
        ([user("q"), reply("", tool_calls=json.dumps([call("f", a=1)]))], [text_of("f", a=1)]),
        ([user("q"), reply("", tool_calls=[{"name": "f", "parameters": {"a": 1}}])], [text_of("f", a=1)]),
        ([user("q"), reply("", tool_calls=[{"function": {"name": "f"}, "arguments": {"a": 1}}])], [text_of("f", a=1)]),
        ([human("q"), SHARED_CALL, {"from": "observation", "value": "2"}, gpt("y")], [text_of("f", a=1), "y"]),
        ([user("q"), CALLS, RESULT, reply("y")], [f"{text_of('f')}\n{text_of('g')}", "y"]),
    ],
)
def test_other_notations_are_learned_in_ours(messages: list[Row], taught: list[str], tmp_path: Path) -> None:
    samples, _ = read(as_jsonl(tmp_path / "rows.jsonl", [{"messages": messages}]))
    assert learnt(samples) == [taught]


GOOD, BAD = [reply("GOOD")], [reply("BAD")]
WITH_PROMPT = {"chosen": said("q", "GOOD"), "rejected": said("q", "BAD")}
RATED = [{"response": "BAD", "overall_score": 3.0}, {"response": "GOOD", "overall_score": 8.5}]
PREFERENCES: dict[str, Row] = {
    "after a prompt": {"prompt": [user("q")], "chosen": GOOD, "rejected": BAD},
    "with the prompt": WITH_PROMPT,
    "with history": {"chosen": said("p", "old", "q", "GOOD"), "rejected": said("p", "old", "q", "BAD")},
    "UltraFeedback's binarised rows": WITH_PROMPT | {"prompt": "q", "messages": said("q", "GOOD"), "score_chosen": 8.0},
    "UltraFeedback": {"instruction": "q", "completions": RATED},
    "LLaMA-Factory": {"conversations": [human("q")], "chosen": gpt("GOOD"), "rejected": gpt("BAD")},
    "OpenAI": {"input": {"messages": [user("q")]}, "preferred_output": GOOD, "non_preferred_output": BAD},
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_of_a_preference_sft_learns_the_better_and_dpo_both_sides_after_the_prompt(name: str, tmp_path: Path) -> None:
    path = as_jsonl(tmp_path / "rows.jsonl", [PREFERENCES[name]])
    assert learnt(read(path)[0]) == [["GOOD"]]
    (pair,), _ = read(path, "dpo")
    chosen, rejected = pair.sides
    assert chosen.messages[:-1] == rejected.messages[:-1] and rejected.messages[-1].content == "BAD"
    assert chosen.messages[chosen.learn_from :] == chosen.messages[-1:]


@pytest.mark.parametrize("goal", ["dpo", "reward"])
def test_a_pair_with_equal_sides_is_left_out_and_counted(goal: Goal, tmp_path: Path) -> None:
    chosen, rejected = ([reply("yes", reasoning_content=why)] for why in ("sound", "unsound"))
    rows = [
        {"prompt": [user("q1")], "chosen": chosen, "rejected": rejected},
        {"prompt": [user("q2")], "chosen": [reply("yes")], "rejected": [reply("yes ")]},
        {"messages": [user("q3"), reply("a")], "return": 0, "task": "t"},
        {"messages": [user("q3"), reply("a")], "return": 1, "task": "t"},
        PREFERENCES["after a prompt"],
    ]
    taught, left_out = read(as_jsonl(tmp_path / "rows.jsonl", rows), goal)
    assert len(taught) == 1 and left_out == {EQUAL_SIDES: 3}


def test_a_bad_row_of_kto_is_not_imitated_and_dpo_pairs_it_with_a_good_one_of_its_prompt(tmp_path: Path) -> None:
    rows = [
        {"prompt": [user("q")], "completion": [reply("BAD")], "label": False},
        {"prompt": [user("q")], "completion": [reply("GOOD")], "label": True},
        {"messages": [user("q2"), reply("BAD")], "label": None, "kto_tag": False},
    ]
    path = as_jsonl(tmp_path / "rows.jsonl", rows)
    taught, left_out = read(path)
    assert learnt(taught) == [["GOOD"]]
    assert left_out == {"marked `label`, not to be learned": 1, "marked `kto_tag`, not to be learned": 1}
    (pair,), _ = read(path, "dpo")
    assert [side.messages[-1].content for side in pair.sides] == ["GOOD", "BAD"]


@pytest.mark.parametrize("goal", ["sft", "dpo"])
def test_no_prompt_is_trained_on_and_held_out(goal: Goal, tmp_path: Path) -> None:
    rows = [
        {"messages": [user(f"question {task}"), reply(f"reply {task} {member}")]}
        if goal == "sft"
        else {"prompt": [user(f"question {task}")], "chosen": [reply("a")], "rejected": [reply(f"reply {member}")]}
        for task in range(60)
        for member in range(5)
    ]
    path = as_jsonl(tmp_path / "rows.jsonl", rows)
    taught, held_out, _ = read_samples(FitOptions(data=str(path), held_out=0.2), goal=goal)
    prompts = [{sample.sides[0].messages[0].content for sample in part} for part in (taught, held_out)]
    assert len(taught) + len(held_out) == 300 and prompts[1] and not prompts[0] & prompts[1]


def test_what_data_writes_is_read_as_its_input_is(tmp_path: Path) -> None:
    rows = [
        {"messages": [user("a"), reply("b", weight=0), user("c"), reply("d", reasoning="hm")], "turn_labels": [1, 0.5]},
        {"prompt": [user("e"), reply("f"), user("g")], "completion": [reply("h")], "turn_labels": [0]},
        {"conversations": [user("i"), BARE_CALL], "tools": [tool("f")], "turn_labels": [None]},
        {"messages": [user("a"), reply("b"), user("c"), reply("d", reasoning="hm", weight=0)], "turn_labels": [1, 1]},
        {"messages": [user("j"), reply("k")], "label": True, "turn_labels": [1]},
        {"messages": [user("j"), reply("l")], "label": False, "turn_labels": [1]},
    ]
    path = as_jsonl(tmp_path / "rows.jsonl", rows)
    assert main(["data", f"{tmp_path}/out.jsonl", f"--data={path}"]) == 0
    for goal in ("sft", "prm"):
        before, after = (read(tmp_path / name, goal)[0] for name in ("rows.jsonl", "out.jsonl"))
        assert learnt(before) == learnt(after) and len(before) == 5
        assert [sample.task for sample in before] == [sample.task for sample in after]
        for one, other in zip(before, after, strict=True):
            side = described(one.sides[0])
            assert side.messages == other.sides[0].messages and side.labels == other.sides[0].labels


def test_a_byte_order_mark_and_blank_lines_are_no_rows_and_an_unreadable_file_says_why(tmp_path: Path) -> None:
    path, row = tmp_path / "rows.jsonl", json.dumps({"prompt": "q", "answer": "a", "messages": [user("q"), reply("a")]})
    path.write_text(f"\ufeff\n\ufeff{row}\n\n   \n{row}\n\n")
    assert len(read(path)[0]) == 1
    assert asyncio.run(scores(path, {}, "a"))[1] == 1.0
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"folder\.jsonl cannot be read: Is a directory"):
        make_env("dataset", {"train": f"{tmp_path}/folder.jsonl"})


def test_a_name_that_stands_twice_is_refused_in_each_format_and_depth(tmp_path: Path) -> None:
    twice, deeper = '{"prompt": "q", "prompt": "r"}', '{"prompt": "q", "of": [{"a": 1, "a": 2}]}'
    (tmp_path / "rows.jsonl").write_text(f'{twice}\n{deeper}\n{{"prompt": "q"}}\n')
    faults = [line.fault for line in read_lines(tmp_path / "rows.jsonl")]
    assert ["it has 'prompt' twice" in faults[0], "it has 'a' twice" in faults[1], faults[2]] == [True, True, ""]
    (tmp_path / "rows.json").write_text(f"[{twice}]")
    pq.write_table(pa.Table.from_arrays([pa.array(["q"])] * 2, names=["prompt"] * 2), tmp_path / "rows.parquet")
    for name in ("rows.json", "rows.parquet"):
        with pytest.raises(ConfigError, match="it has 'prompt' twice; keep one of them"):
            list(read_lines(tmp_path / name))


def test_a_data_set_of_a_hub_is_read_by_every_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": [user("a"), {"role": "assistant", "content": "b", "name": None}], "turn_labels": [1.0]}]
    hub = types.ModuleType("datasets")
    hub.load_dataset = lambda *_, split: iter(rows)
    hub.exceptions = types.SimpleNamespace(DatasetsError=OSError)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    for goal in ("sft", "prm"):
        assert learnt(read_samples(FitOptions(data="hub:a/b:train", held_out=0), goal=goal)[0]) == [["b"]]
    assert main(["data", f"{tmp_path}/out.jsonl", "--data=hub:a/b:train"]) == 0
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="install the extra `hub`"):
        read_samples(FitOptions(data="hub:a/b:train"), goal="dpo")


HUGE = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from slipstream.common.rows.row_source import read_lines
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]) << 20,) * 2)
for line in read_lines(Path(sys.argv[1])):
    print(line.number)
"""


@pytest.mark.long
def test_a_row_that_does_not_fit_into_memory_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "huge.parquet"
    text = "a" * (600 << 20)  # it takes little room in the file
    pq.write_table(pa.table({"task": pa.array([text], type=pa.large_string())}), path, compression="zstd")
    done = subprocess.run([sys.executable, "-c", HUGE, str(path), "1200"], capture_output=True, text=True)
    assert done.returncode == 1 and f"ConfigError: {path}, after row 0: its next 64 rows do not fit into" in done.stderr
