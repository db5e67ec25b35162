"""Data sets with several turns and tools: recorded conversations in which the policy gives the replies."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import EnvError, Observation
from slipstream.tools.run.prepare import expert_episodes, vocabulary_texts
from slipstream.tools.run.tiny_model import tiny_tokenizer
from tests.adapters.held import acted
from tests.envhub.dataset.rows import write_rows
from tests.envhub.dataset.test_dataset_env import CHECKS_OF_CONTRACT, REPOSITORY, on_rows
from tests.envhub.env_cases import Case
from tests.envhub.rewards.own import Own, own

__all__ = ["own"]  # a fixture

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def text_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TRIP = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it warm in Bern?"},
        {"role": "assistant", "content": None, "tool_calls": [call("weather", town="Bern", day=1)]},
        {"role": "tool", "content": "21 degrees"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And how warm is it in Kiel?"},
        {"role": "assistant", "content": None, "tool_calls": [call("weather", town="Kiel", day=1)]},
        {"role": "tool", "content": "12 degrees"},
        {"role": "assistant", "content": "It is 12 degrees."},
    ],
    "tools": [WEATHER],
    "answer": 12,
}
OPTIONS = {"conversation": "messages", "tools": "tools", "check": "number"}
TOOLS = {"tool_function": "own_rewards:tools"}


@pytest.fixture
def trip(tmp_path: Path) -> dict[str, Any]:
    return on_rows(tmp_path, [TRIP], **OPTIONS)


def said(observation: Observation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in observation.messages]


def test_the_user_s_next_message_follows_each_answer_and_the_last_reply_is_scored(trip: dict[str, Any]) -> None:
    opening, first, second = acted("dataset", trip, 0, ["I guess so.", "It is 12."])
    assert [role for role, _ in said(opening)] == ["system", "user"]
    assert opening.messages[0].content.startswith("Be brief.\n\nThese tools can be called:\n")
    assert '"name": "weather"' in opening.messages[0].content
    assert "Yes." not in str(said(opening)), "recorded replies are not shown"
    assert said(first) == [("user", "And how warm is it in Kiel?")]
    assert (first.rewards, first.terminated) == ({"right": 0.0}, False)
    assert (second.rewards, second.score, second.success, second.terminated) == ({"right": 1.0}, 1.0, True, True)


def test_a_call_gets_its_recorded_result_however_it_is_written(trip: dict[str, Any]) -> None:
    kiel = '<tool_call>{"arguments": {"day": 1, "town": "Kiel"}, "name": "weather"}</tool_call>'
    _, other, answer = acted("dataset", trip, 0, [f"I look. {kiel}", text_of("weather", town="Bern", day=1) + kiel])
    assert said(other) == [("tool", "12 degrees")]
    assert said(answer) == [("tool", "21 degrees\n12 degrees")]
    assert not answer.terminated and answer.valid_action


@pytest.mark.parametrize(
    ("reply", "text", "is_valid"),
    [
        (text_of("weather", town="Rome"), "no result of this call of weather is recorded", True),
        ("<tool_call>weather</tool_call>", "a call must be JSON like", False),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "a call must be JSON like", False),
        ('<tool_call>{"name": "weather"}', "close it by </tool_call>", False),
        (text_of("weather") * 101, "101 calls in one reply, the limit is 100", False),
    ],
)
def test_a_call_without_a_result_changes_nothing(trip: dict[str, Any], reply: str, text: str, is_valid: bool) -> None:
    _, refused, first = acted("dataset", trip, 0, [reply, "Yes."])
    assert text in refused.messages[0].content
    assert (refused.valid_action, refused.terminated) == (is_valid, False)
    assert said(first) == [("user", "And how warm is it in Kiel?")]


def test_a_call_nested_however_deep_fails_no_attempt(trip: dict[str, Any]) -> None:
    """Python reads JSON of a depth at which other functions give up."""
    for depth in range(100, 1100, 20):
        arguments = f'{{"name": "weather", "arguments": {{"town": {depth * "["}{depth * "]"}}}}}'
        _, answer = acted("dataset", trip, 0, [f"<tool_call>{arguments}</tool_call>"])
        text = "no result of this call" if answer.valid_action else "a call must be JSON like"
        assert text in answer.messages[0].content


def spaced(text: str) -> str:
    return " ".join(re.findall(r"[A-Za-z0-9]+|[^\sA-Za-z0-9]", text))


async def test_a_word_level_tokenizer_s_spaces_change_neither_calls_nor_the_place_in_the_record(tmp_path: Path) -> None:
    replies = [text_of("weather_of", town="New York", on_day="2026-05-01"), text_of("weather_of", town="Bern")]
    replies += ["It is 21 degrees; the day before: 12."]
    said = [("user", "How warm is it?"), ("assistant", replies[0]), ("tool", "12")]
    said += [("assistant", replies[1]), ("tool", "21"), ("assistant", replies[2])]
    messages = [{"role": role, "content": content} for role, content in said]
    rows = [{"messages": messages, "answer": 12, "tools": [WEATHER]}]
    env, results = make_env("dataset", on_rows(tmp_path, rows, **OPTIONS)), list[str]()
    await env.reset(Task(env="dataset", split="train", index=0))
    for reply in replies:
        assert spaced(env.expert()) == spaced(reply), "the record continues"
        observation = await env.step(spaced(env.expert()))
        results.append(observation.messages[-1].content)
    assert results[:2] == ["12", "21"] and observation.success


def test_a_function_gets_the_names_of_arguments_without_a_tokenizer_s_spaces(trip: dict[str, Any], own: Own) -> None:
    own.tools = lambda name, arguments, row: json.dumps([name, arguments])
    reply = spaced(text_of("weather_of", on_day="  two  spaces ", town={"old_name": 1}))
    _, result = acted("dataset", trip | TOOLS, 0, [reply])
    assert json.loads(said(result)[0][1]) == ["weather_of", {"on_day": " two spaces ", "town": {"old_name": 1}}]


def test_a_function_of_the_user_s_answers_calls_or_fails_the_attempt(trip: dict[str, Any], own: Own) -> None:
    own.tools = lambda name, arguments, row: f"{name} of {arguments['town']} for {row['answer']}"
    _, result = acted("dataset", trip | TOOLS, 0, [text_of("weather", town="Rome")])
    assert said(result) == [("tool", "weather of Rome for 12")]
    own.tools = lambda name, arguments, row: 7
    with pytest.raises(EnvError, match=r"tool_function` must return a text, got 7"):
        acted("dataset", trip | TOOLS, 0, [text_of("weather")])
    with pytest.raises(ConfigError, match="no_such"):
        make_env("dataset", trip | {"tool_function": "own_rewards:no_such"})


def test_results_with_ids_belong_to_their_calls_in_any_order(tmp_path: Path) -> None:
    calls = [call("weather", town="Bern") | {"id": "b"}, call("weather", town="Kiel") | {"id": "k"}]
    messages = [
        {"role": "user", "content": "Where is it warmer?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "k", "content": "12 degrees"},
        {"role": "tool", "tool_call_id": "b", "content": "21 degrees"},
        {"role": "assistant", "content": "21"},
    ]
    options = on_rows(tmp_path, [{"messages": messages, "tools": [WEATHER], "answer": 21}], **OPTIONS)
    _, bern, kiel = acted("dataset", options, 0, [text_of("weather", town=town) for town in ("Bern", "Kiel")])
    assert said(bern) + said(kiel) == [("tool", "21 degrees"), ("tool", "12 degrees")]


def test_the_results_of_equal_calls_come_in_their_order(tmp_path: Path) -> None:
    look = {"role": "assistant", "content": "", "tool_calls": [call("look")]}
    messages = [{"role": "user", "content": "Look twice."}, look, {"role": "tool", "content": "closed"}, look]
    messages += [{"role": "tool", "content": "open"}, {"role": "assistant", "content": "open"}]
    rows = [{"messages": messages, "answer": "open", "tools": [{"name": "look"}]}]
    options = on_rows(tmp_path, rows, **(OPTIONS | {"check": "exact"}))
    _, *looks, end = acted("dataset", options, 0, [*[text_of("look")] * 3, "open"])
    assert [observation.messages[0].content for observation in looks] == ["closed", "open", "open"]
    assert end.success


def test_a_tiny_model_can_call_the_tools_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = REPOSITORY / "docs" / "examples"
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, examples / "stock.py"], check=True, timeout=60)
    config = load_config(str(REPOSITORY / "conf" / "quickstart.yaml"), [], presets=[str(examples / "stock.yaml")])
    tokenizer = tiny_tokenizer(vocabulary_texts(config.env, 40), config.model.max_tokens)
    tasks = {index: Task(env="dataset", split="train", index=index) for index in range(20)}
    played = list(expert_episodes(config, tokenizer, tasks, noise=0.0))
    assert [(episode.success, len(episode.turns)) for episode in played] == [(True, 4)] * 20


@pytest.mark.parametrize("check", CHECKS_OF_CONTRACT, ids=lambda check: check.__name__)
def test_a_conversation_keeps_the_contract(check: Any, tmp_path: Path) -> None:
    def row(number: int) -> dict[str, Any]:
        said = ("user", f"Think of {number}."), ("assistant", "Done."), ("user", "Which number is it?")
        return {"messages": [{"role": role, "content": content} for role, content in said], "answer": number}

    path = write_rows(tmp_path / "rows.jsonl", [row(number) for number in range(60)])
    options = {"train": path, "conversation": "messages", "check": "number"}
    check(Case(name="dataset", max_turns=5, noisy_success=0, options=options, is_spaced=False, share=0.05))


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ("hello", "must be a list of messages"),
        ([{"role": "assistant", "content": "Hi."}], "must begin with a message of the user"),
        ([{"role": "user", "content": "Hi."}, {"role": "robot", "content": "Hi."}], "must have a role"),
        ([{"role": "user", "content": "Hi."}, {"role": "tool", "content": "12"}], "a result without a call"),
        ([{"role": "user", "content": "Hi."}, {"role": "assistant", "tool_calls": [7]}], "a function with a name"),
        ([{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "<tool_call>x</tool_call>"}], "JSON"),
    ],
)
def test_a_malformed_conversation_is_refused_with_its_row(tmp_path: Path, messages: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"row 2: .*{why}"):
        make_env("dataset", on_rows(tmp_path, [TRIP, {**TRIP, "messages": messages}], **OPTIONS))
