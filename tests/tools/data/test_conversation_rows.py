"""Rows of conversations in the shapes of published data sets, and garbage in their place."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.actors.episode.actions import Actions
from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.message import Message
from slipstream.common.rows import row_source
from slipstream.common.rows.row_source import BadRow, read_lines
from slipstream.common.text.action_format import ParsedAction, ToolCalls
from slipstream.common.text.chat import Chat, reply_form
from slipstream.common.text.codec import encoder
from slipstream.common.text.dialogue import Tokeniser
from slipstream.envhub.env import Observation
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.cli.fit_verb import _examples
from slipstream.tools.data.conversation_rows import Conversation, conversation_of, prompted
from slipstream.tools.data.fit_rows import described, read_samples
from tests.common.text.chat_templates import family_tokenizer
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer
from tests.tools.data.test_row_formats import as_jsonl, as_parquet, call, reply, said, tool, user
from tests.tools.data.test_seed_files import shares

TALK = [("user", "Look."), ("assistant", "Ok."), ("user", "A door."), ("assistant", "open door")]
ROLE_CONTENT = said(*(text for _, text in TALK))
AGENT_INSTRUCT = shares(*(text for _, text in TALK))


def told(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


def learnt(conversation: Conversation) -> list[str]:
    return [message.content for at, message in enumerate(conversation.messages) if conversation.is_learnt(at)]


def test_a_file_of_several_shapes_has_nulls_for_the_other_shapes(tmp_path: Path) -> None:
    pair = {"chosen": ROLE_CONTENT, "rejected": [*ROLE_CONTENT[:3], reply("wait")]}
    rows = [{"messages": ROLE_CONTENT}, {"conversations": AGENT_INSTRUCT}, pair, {"id": "unread"}]
    columns = ("messages", "conversations", "prompt", "chosen", "rejected", "id")
    rows = [{name: row.get(name) for name in columns} for row in rows]
    for path in (as_parquet(tmp_path / "a.parquet", rows), as_jsonl(tmp_path / "a.jsonl", rows)):
        first, second, third, unread = (line.row for line in read_lines(path))
        assert told(conversation_of(first)) == told(conversation_of(second)) == TALK
        assert told(prompted(third, "chosen")) == TALK
        assert unread["messages"] is None


@pytest.mark.parametrize("column", ["task", "content", "return", "name of a column", "nested"])
def test_a_row_with_half_a_character_anywhere_is_named_with_its_line(tmp_path: Path, column: str) -> None:
    half: dict[str, Any] = {
        "content": {"messages": [user("\ud83d"), *ROLE_CONTENT[1:]]},
        "name of a column": {"\udc00": 1},
        "nested": {"tools": [{"deep": ["\ud800x"]}]},
    }.get(column, {column: "\ud800"})
    whole = {"messages": ROLE_CONTENT, "task": "\U0001f600"}
    path = as_jsonl(tmp_path / "rows.jsonl", [whole, {"messages": ROLE_CONTENT} | half])
    first, second = read_lines(path)
    assert first.row == whole and "has half a character, \\ud" in second.fault
    with pytest.raises(ConfigError, match=f"{path}, line 2 has half a character"):
        read_samples(FitOptions(data=str(path)), goal="sft")
    path.write_bytes(b'{"task": "\xed\xa0\x80"}\n')
    assert "is not JSON: 'utf-8' codec can't decode" in next(read_lines(path)).fault


def test_a_system_column_comes_first_and_once_and_moves_what_is_not_learnt_from() -> None:
    conversation = conversation_of({"system": "Be brief.", "conversations": AGENT_INSTRUCT})
    assert told(conversation) == [("system", "Be brief."), *TALK]
    assert learnt(conversation) == ["open door"]
    expected = [("system", "Be brief."), ("user", "q"), ("assistant", "a")]
    columns = {name: [reply("a")] for name in ("completion", "chosen", "rejected")}
    row = {"system": "Be brief.", "prompt": [user("q")]} | columns
    assert told(conversation_of(row)) == expected
    assert [told(prompted(row, column)) for column in ("chosen", "rejected")] == [expected, expected]


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_their_calls_become_text(as_text: bool) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    called = {"name": "weather", "arguments": '{"city": "Köln"}' if as_text else {"city": "Köln"}}
    row = {
        "tools": json.dumps(tools) if as_text else tools,
        "messages": [
            user("Köln?"),
            reply(None, tool_calls=[{"id": "1", "type": "function", "function": called}]),
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
            reply("It rains.", loss=False),
        ],
    }
    conversation = described(conversation_of(row))
    roles, texts = zip(*told(conversation), strict=True)
    assert roles == ("system", "user", "assistant", "tool", "assistant")
    assert json.dumps(tools[0]) in texts[0]
    assert texts[2] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert learnt(conversation) == [texts[2]]
    row["messages"] = [{"role": "system", "content": "Be brief."}, *row["messages"]]
    assert told(described(conversation_of(row)))[0][1].startswith("Be brief.\n\nThese tools can be called:")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": ROLE_CONTENT[:1], "reward_model": {"ground_truth": "4"}}, "rows with only a prompt are tasks"),
        ({"conversations": []}, r"`conversations` must be a list of messages .*, got \[\]"),
        ({"conversations": ["hello", "hi"]}, "must have a role .* or from and value, got 'hello'"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "must have a role .*'robot'"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "must have a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must have a role .*image_url"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": "f()"}]}, "a call must be JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "a function with a name"),
        ({"messages": [reply(None, tool_calls=[{"name": "f", "arguments": "{"}])]}, "of a call must be JSON, got '{'"),
        ({"messages": ROLE_CONTENT, "tools": "{"}, "`tools` must be a list, or its JSON, got '{'"),
        ({"messages": ROLE_CONTENT, "tools": {"a": 1}}, "`tools` must be a list"),
        ({}, "neither `messages` nor `prompt` and `completion`, but nothing"),
    ],
)
def test_a_row_in_no_known_shape_says_why(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadRow, match=complaint):
        conversation_of(row)


def test_unreadable_lines_are_numbered_and_the_others_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_source, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "rows.jsonl"
    long = b'{"a": "' + b"x" * 5000 + b'"}'
    path.write_bytes(b'{"a": 1}\n{"a"\n\xff\xfe\n[1]\n\n' + long + b"\n" + b"[" * 900 + b'\n{"a": 2}')
    lines = list(read_lines(path))
    assert [(line.number, line.row) for line in lines if not line.fault] == [(1, {"a": 1}), (8, {"a": 2})]
    faults = {line.number: line.fault for line in lines if line.fault}
    assert list(faults) == [2, 3, 4, 6, 7], "a blank line is no row"
    assert faults[4] == "must be a JSON object, got a list" and faults[6] == "is longer than 1000 bytes"
    assert all(faults[number].startswith("is not JSON") for number in (2, 3, 7))


def test_parquet_is_read_in_batches_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    rows = [{"id": str(index), "conversations": AGENT_INSTRUCT} for index in range(200)]
    path = as_parquet(tmp_path / "rows.parquet", rows)
    lines = list(read_lines(path))
    assert [line.number for line in lines] == list(range(1, 201))
    assert learnt(conversation_of(lines[199].row)) == ["open door"]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"rows\.parquet cannot be read after row 0"):
        list(read_lines(path))


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "phi4-mini"])
def test_with_calls_as_actions_sft_reads_the_tokens_that_a_run_shows(family: str, tmp_path: Path) -> None:
    tokenizer = family_tokenizer(family, tmp_path)
    look = tool("look")
    called = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    first = Observation(messages=[Message("system", "Play."), Message("user", "go")], rewards={}, tools=[look])
    chat, form = Chat(tokenizer), reply_form(tokenizer)
    actions = Actions(env=None, chat=chat, action_format=ToolCalls(), parse=object())  # type: ignore[arg-type]
    prompt = actions.open(asyncio.run(actions.opening(first)))
    said_before = ((called, "tool"), ("done", "user"))
    replies = [encoder(tokenizer)(form.write(text, before=following)) for text, following in said_before]
    chat.reply(replies[0])
    result = Observation(messages=[Message("user", "a door")], rewards={})
    branches = [[*prompt.tokens, *replies[0]]]
    extension = chat.extend(asyncio.run(actions.shown(ParsedAction(text="{}", valid=True), result)))
    branches = [*branches, []] if extension.new_branch else branches
    branches[-1] += [*extension.tokens, *replies[1]]

    answered = [{"role": "tool", "content": "a door"}, reply("done")]
    messages = [{"role": "system", "content": "Play."}, user("go"), reply(None, tool_calls=[call("look")]), *answered]
    data = as_jsonl(tmp_path / "rows.jsonl", [{"messages": messages, "tools": [look]}])
    calls_are_actions = ["env.action_format=tools", "model.tool_parser=hermes", "warm_start.episodes=0"]
    config = load_config(None, [f"model.path={tmp_path}", "model.max_tokens=2048", *calls_are_actions])
    samples, _, left_out = read_samples(FitOptions(data=str(data), held_out=0.0), goal="sft")
    ((example,),) = _examples(config, "sft", [samples], left_out, data=str(data))
    assert [sequence.tokens.tolist() for sequence in example[0]] == branches
    config.env.action_format = "plain"
    ((other,),) = _examples(config, "sft", [samples], left_out, data=str(data))
    assert [sequence.tokens.tolist() for sequence in other[0]] != branches


def test_a_template_that_shows_no_tools_learns_no_row_with_them() -> None:
    talk = [Message(role, text) for role, text in TALK]
    with pytest.raises(ValueError, match="the chat template does not show tools"):
        Tokeniser(byte_tokenizer(CHATML)).branches(talk, tools=[{"type": "function", "function": {"name": "look"}}])
