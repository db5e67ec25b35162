"""Agents whose tool calls vLLM's own parsers read: what they see, and that no sampled token changes on the way back."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.chat.chat_completion import Choice

from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.episode.fresh_env import fresh_env
from slipstream.actors.episode.resume import resumed_record
from slipstream.common.config.env_config import EnvConfig, MixtureEntry
from slipstream.common.records.message import valid_text
from slipstream.common.records.trajectory import Trajectory, check
from slipstream.common.text.action_format import ToolCalls
from slipstream.envhub.catalogue import make_any_env
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.tools.lab.soak.scripted_engine import ScriptedEngine
from slipstream.tools.run.prepare import vocabulary_texts
from slipstream.tools.run.tiny_model import tiny_tokenizer
from tests.actors.episode.episodes import ALLOWANCE, apart, attempt_on, engine_of, ids, rollout_of, turns_of
from tests.actors.tiny_caller import CLOSING, OPENING, add_calls
from tests.actors.tool_parsing import HERMES, LOOK, QWEN_XML, Parsing, parsing
from tests.adapters.agents import shop_openai
from tests.common.text.small_tokenizer import merging_tokenizer

TOKENIZER = merging_tokenizer(HERMES)
LONG = replace(ALLOWANCE, max_tokens=1500, step_timeout_s=60.0)
CALL = '<tool_call>\n{"name":"look","arguments":{"at":"ab"}}\n</tool_call>'  # the template writes other spaces
FLY = CALL.replace("look", "fly")  # no tool that there is
QWEN = "<tool_call><function=look>\n<parameter=at>ab</parameter>\n</function></tool_call>"

Messages = list[dict[str, Any]]
GO = {"role": "user", "content": "go"}


async def asked(client: openai.AsyncOpenAI, messages: Messages, **settings: Any) -> Choice:
    response = await client.chat.completions.create(model="gpt-4o", messages=messages, tools=[LOOK], **settings)
    return response.choices[0]


@dataclass
class Writer:
    """An engine that writes these texts in turn, character by character: its tokenizer would merge "ab"."""

    texts: list[str]
    written: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompts and answers

    def engine(self) -> ScriptedEngine:
        return engine_of(self._write, max_tokens=LONG.max_tokens)

    def _write(self, prompt: list[int], seed: int | None) -> list[int]:
        self.written.append((prompt, apart(TOKENIZER, self.texts[len(self.written)] + TOKENIZER.eos_token)))
        return self.written[-1][1]


async def runs_tools(task: dict[str, Any], client: openai.AsyncOpenAI) -> dict[str, float]:
    """An agent as OpenAI's documentation writes it: while there are calls, it answers them."""
    messages: Messages = [GO]
    num_calls = 0
    for _ in range(3):
        choice = await asked(client, messages)
        messages.append(choice.message)
        if not choice.message.tool_calls:
            assert choice.finish_reason == "stop"
            break
        assert choice.finish_reason == "tool_calls"
        for call in choice.message.tool_calls:
            seen = json.loads(call.function.arguments)["at"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name} {seen}"})
            num_calls += 1
    return {"calls": float(num_calls)}


async def streams_tools(task: dict[str, Any], client: openai.AsyncOpenAI, **settings: Any) -> dict[str, float]:
    messages: Messages = [GO]
    request = {"model": "gpt-4o", "messages": messages, "tools": [LOOK], **settings}
    async with client.chat.completions.stream(**request) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    sent = {"id": True, "type": True, "function": {"name", "arguments"}}
    calls = [call.model_dump(include=sent) for call in message.tool_calls or []]
    said = {"content": message.content} if message.content else {}
    messages.append({"role": "assistant", **said, "tool_calls": calls})
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "look ab"} for call in calls]
    await client.chat.completions.create(**request)
    return {"calls": float(len(calls))}


async def responds(
    task: dict[str, Any], client: openai.AsyncOpenAI, *, streamed: bool = False, **settings: Any
) -> dict[str, float]:
    """The same on the Responses API, whose output items go back as they came."""
    items: list[Any] = [GO]
    tool = {"type": "function", **LOOK["function"]}
    num_calls = 0
    for _ in range(3):
        request = {"model": "gpt-4o", "instructions": "play", "input": items, "tools": [tool], **settings}
        if streamed:
            async with client.responses.stream(**request) as stream:
                response = await stream.get_final_response()
        else:
            response = await client.responses.create(**request)
        assert response.status == "completed" and response.usage.output_tokens > 0
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            assert response.output_text == "ab."
            break
        for call in calls:
            seen = f"{call.name} {json.loads(call.arguments)['at']}"
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": seen})
            num_calls += 1
    return {"calls": float(num_calls)}


streams_responses = partial(responds, streamed=True)
streams_one_call = partial(streams_tools, parallel_tool_calls=False)
responds_by_one_call = partial(responds, parallel_tool_calls=False)


async def forgets_calls(task: dict[str, Any], client: openai.AsyncOpenAI) -> dict[str, float]:
    messages: Messages = [GO]
    message = (await asked(client, messages)).message.model_dump(exclude_none=True)
    message["tool_calls"][0]["function"]["arguments"] = '{"at": "elsewhere"}'
    messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "nothing"}]
    await asked(client, messages)
    return {"calls": 1.0}


async def drops_thoughts(task: dict[str, Any], client: openai.AsyncOpenAI) -> dict[str, float]:
    messages: Messages = [GO]
    message = (await asked(client, messages)).message
    assert message.reasoning_content == "ab?"
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "and?"}]
    await asked(client, messages)
    return {"calls": 0.0}


async def answers_one_call(
    task: dict[str, Any], client: openai.AsyncOpenAI, *, then: dict[str, Any], **settings: Any
) -> dict[str, float]:
    """An agent that continues with the one answer that calls a tool of its, by one call."""
    messages: Messages = [GO]
    request: dict[str, Any] = {"model": "gpt-4o", "messages": messages, "tools": [LOOK]}
    response = await client.chat.completions.create(**request, **settings)
    (message,) = [choice.message for choice in response.choices if choice.message.tool_calls[0].function.name == "look"]
    (call,) = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "look ab"}]
    await client.chat.completions.create(**request, **then)
    return {"calls": 1.0}


takes_one_call = partial(answers_one_call, then={"parallel_tool_calls": False}, parallel_tool_calls=False)
chooses_among_calls = partial(answers_one_call, then={}, n=2)
stops_after_a_call = partial(answers_one_call, then={}, stop=["</tool_call>"])


async def forbids_tools(task: dict[str, Any], client: openai.AsyncOpenAI) -> dict[str, float]:
    message = (await asked(client, [GO], tool_choice="none")).message
    assert (message.content, message.tool_calls) == (CALL, None)
    return {"calls": 0.0}


async def played(
    agent: str, writer: Writer, parse: Parsing | None, *, record: EpisodeRecord | None = None, template: str = HERMES
) -> Trajectory:
    record = record or EpisodeRecord(attempt=attempt_on(max_turn_tokens=400))
    entry = MixtureEntry(name="agent", options={"agent": f"tests.actors.episode.test_tool_calls:{agent}"})
    settings: dict[str, Any] = {"tokenizer": merging_tokenizer(template), "allowance": LONG, "parse": parse}
    async with fresh_env({"shop": entry}, record.attempt.task, timeout_s=60.0) as env:
        trajectory = await rollout_of(env, writer.engine(), record=record, **settings)
    check(trajectory, vocab_size=len(TOKENIZER))
    return trajectory


@pytest.mark.parametrize(
    ("tool_parser", "text"),
    [
        *(("hermes", text) for text in (CALL, f"I look. {CALL}", f"{CALL}\n{CALL}", f"{CALL} ab, which no agent sees")),
        ("qwen3_xml", QWEN),
    ],
)
@pytest.mark.parametrize("agent", ["runs_tools", "streams_tools", "responds", "streams_responses"])
async def test_a_tool_call_is_parsed_and_keeps_its_sampled_tokens(agent: str, tool_parser: str, text: str) -> None:
    writer = Writer([text, "ab."])
    template = QWEN_XML if tool_parser == "qwen3_xml" else HERMES
    trajectory = await played(agent, writer, parsing(tool_parser), template=template)
    assert turns_of(trajectory) == writer.written and trajectory.branch_starts == [0]
    (first, answer), (second, _) = writer.written
    assert second[: len(first) + len(answer)] == first + answer  # although the template renders the call otherwise
    added = TOKENIZER.decode(second[len(first) + len(answer) :])
    results = "<|im_start|>tool\nlook ab<|im_end|>\n" * text.count("</tool_call>")
    assert added == f"\n{results}<|im_start|>assistant\n"
    assert trajectory.total_reward == text.count("</tool_call>")
    assert [turn.valid_action for turn in trajectory.turns] == [True, True]


MALFORMED = (
    '<tool_call>\n{"name": "look", "arguments": {"at": \n</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    "<tool_call>look</tool_call>",
    "<tool_call>",
)
BY_ONE = ("takes_one_call", "streams_one_call", "responds_by_one_call")


@pytest.mark.parametrize(
    ("agent", "texts", "valid", "num_branches", "num_calls"),
    [
        # A malformed call reaches the agent as text. One of a tool that does not exist is a call, and invalid too.
        *(("runs_tools", [text], [False], 1, 0) for text in MALFORMED),
        ("runs_tools", [FLY, "done"], [False, True], 1, 1),
        ("runs_tools", [f"{CALL}\n{FLY}", "ab."], [False, True], 1, 2),
        # An agent without parallel calls gets the first one, and its next prompt has no other.
        *((agent, [f"{CALL}\n{CALL}", "ab."], [False, True], 2, 1) for agent in BY_ONE),
        *((agent, [CALL, "ab."], [True, True], 1, 1) for agent in BY_ONE),
        ("forgets_calls", [CALL, "ab."], [True, True], 2, 1),
        ("forbids_tools", [CALL], [True], 1, 0),
    ],
)
async def test_what_an_agent_does_with_calls_keeps_their_sampled_tokens_in_branches(
    agent: str, texts: list[str], valid: list[bool], num_branches: int, num_calls: int
) -> None:
    writer = Writer(texts)
    trajectory = await played(agent, writer, parsing())
    assert turns_of(trajectory) == writer.written
    assert [turn.valid_action for turn in trajectory.turns] == valid
    assert (len(trajectory.branch_starts), trajectory.total_reward) == (num_branches, num_calls)
    if agent in BY_ONE:
        assert TOKENIZER.decode(writer.written[1][0]).count("<tool_call>") == 1


def test_the_built_in_loop_plays_by_calls_that_vllms_own_parser_reads() -> None:
    env, written = ShopEnv(), list[str]()

    def calls(prompt: list[int], seed: int | None) -> list[int]:
        call = json.dumps({"name": "act", "arguments": {"action": env.expert()}})
        text = f"so\n<tool_call>\n{call[:-1] if not written else call}\n</tool_call>"  # the first is malformed
        written.append(text)
        return apart(TOKENIZER, text + TOKENIZER.eos_token)

    record, allowance = EpisodeRecord(attempt=attempt_on(max_turn_tokens=200)), replace(LONG, max_tokens=4000)
    settings: dict[str, Any] = {"action_format": ToolCalls(), "allowance": allowance, "parse": parsing()}
    engine = engine_of(calls, max_tokens=4000)
    trajectory = asyncio.run(rollout_of(env, engine, record=record, tokenizer=TOKENIZER, **settings))
    check(trajectory, vocab_size=len(TOKENIZER))
    assert trajectory.success and trajectory.branch_starts == [0]
    assert [turn.valid_action for turn in trajectory.turns] == [False, *[True] * (len(written) - 1)]
    assert [TOKENIZER.decode(answer[:-1]) for _, answer in turns_of(trajectory)] == written


async def test_without_a_parser_a_call_stays_text() -> None:
    trajectory = await played("runs_tools", Writer([CALL]), None)
    assert trajectory.total_reward == 0.0 and trajectory.turns[0].valid_action


async def test_of_two_answers_with_calls_the_one_that_is_sent_back_keeps_its_sampled_tokens() -> None:
    writer = Writer([CALL, FLY, "ab."])
    trajectory = await played("chooses_among_calls", writer, parsing())
    (first, answer), _, (third, _) = writer.written
    assert third[: len(first) + len(answer)] == first + answer and len(trajectory.branch_starts) == 2
    assert [turn.valid_action for turn in trajectory.turns].count(False) == 1


async def test_a_call_at_whose_end_the_agent_stops_keeps_its_sampled_tokens() -> None:
    writer = Writer([f"{CALL} and on", "ab."])
    trajectory = await played("stops_after_a_call", writer, parsing())
    (first, answer), (second, _) = writer.written
    kept = answer[: len(CALL)]  # a token for each character
    assert TOKENIZER.decode(kept) == CALL and second[: len(first) + len(kept)] == first + kept
    assert trajectory.branch_starts == [0] and [turn.valid_action for turn in trajectory.turns] == [True, True]


SEES = f"<think>ab?</think>I look. {CALL}"
LEFT_OUT = (  # a part of the answer, by the template
    ("{{ message['content'] }}", "{% if not message.get('tool_calls') %}{{ message['content'] }}{% endif %}"),
    ("{% if message.get('reasoning_content') %}", "{% if false %}"),
    ("{% for call in message.get('tool_calls') or [] %}", "{% for call in [] %}"),
    ("{% if tools %}", "{% if tools and messages | length == 1 %}"),
)


@pytest.mark.parametrize(
    ("agent", "texts", "left_out", "num_branches"),
    [
        ("runs_tools", [f"<think>ab?</think>\n\n{CALL}", "<think>ab!</think>seen"], None, 1),
        ("responds", [SEES, "<think>ab!</think>ab."], None, 1),
        ("drops_thoughts", ["<think>ab?</think>well", "<think>ab!</think>seen"], None, 2),
        *(("runs_tools", [SEES, "<think>ab!</think>seen"], change, 2) for change in LEFT_OUT),
    ],
)
async def test_a_thought_is_parsed_and_continued_where_all_of_the_answer_is_sent_back(
    agent: str, texts: list[str], left_out: tuple[str, str] | None, num_branches: int
) -> None:
    writer, template = Writer(texts), HERMES.replace(*left_out) if left_out else HERMES
    assert (template == HERMES) is (left_out is None)
    trajectory = await played(agent, writer, parsing(reasoning_parser="qwen3"), template=template)
    assert turns_of(trajectory) == writer.written and len(trajectory.branch_starts) == num_branches


async def test_a_preempted_episode_repeats_its_calls_with_the_same_ids() -> None:
    with_ids = HERMES.replace("\n<tool_call>\n", "\n{{ call['id'] }}<tool_call>\n")
    writer = Writer([CALL, CALL, "done"])
    record = EpisodeRecord(attempt=attempt_on(max_turn_tokens=400))
    whole = await played("runs_tools", writer, parsing(), record=record, template=with_ids)
    record.reopen_last_turn()
    rest = Writer(["done"])
    begun = resumed_record(attempt_on(max_turn_tokens=400), record.partial())
    resumed = await played("runs_tools", rest, parsing(), record=begun, template=with_ids)
    assert len(rest.written) == 1 and resumed.tokens == whole.tokens
    assert resumed.branch_starts == whole.branch_starts


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ({"tool_parser": "hermos"}, "`model.tool_parser` must be empty, or one of vLLM's: .*hermes.*; got 'hermos'"),
        ({"tool_parser": "openai"}, "got 'openai'"),
        ({"reasoning_parser": "thinks"}, "`model.reasoning_parser` must be empty, or one of .*qwen3.*; got 'thinks'"),
        ({"reasoning_parser": "inkling"}, "between .*content_thinking.* the chat template does not have"),
        ({"tool_parser": "llama3_json"}, "does not work with this model: .*python_tag.*; choose the parsers of its"),
    ],
)
def test_a_parser_that_does_not_exist_or_fit_is_refused(names: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parsing(**names)


def test_every_garbage_is_answered() -> None:
    """Whatever a policy writes: each parser that this tokenizer allows answers, and loses no text without a call."""
    garbage = ["", "<tool_call>" * 300, "[" * 3000, '{"name": ' * 1000, "<function=", "</tool_call>", "\ud83d", "\0"]
    for name in ("hermes", "qwen3_xml", "glm45", "kimi_k2", "llama4_pythonic", "pythonic", "xlam", "gemma4"):
        parse = parsing(name)
        for text in garbage:
            answer = asyncio.run(parse(text, tokens=[1], prompt=[1], tools=[LOOK]))
            assert answer.tool_calls or answer.content == valid_text(text) or not text.strip()


def test_an_agent_shops_with_a_tiny_model_by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer(vocabulary_texts(EnvConfig(max_turns=8), 60), 512)
    add_calls(tokenizer)
    shop = ShopEnv()
    monkeypatch.setattr(shop_openai, "ShopEnv", lambda profile: shop)
    closing = CLOSING + tokenizer.eos_token
    engine = engine_of(lambda *_: ids(tokenizer, f"{OPENING}{shop.expert()}{closing}"), max_tokens=512)
    env = make_any_env("agent", {"agent": "tests.adapters.agents.shop_openai:play"})
    parse = parsing(tokenizer=tokenizer)
    played = rollout_of(env, engine, tokenizer=tokenizer, allowance=LONG, parse=parse)  # type: ignore[arg-type]
    trajectory = asyncio.run(played)
    assert trajectory.success and len(trajectory.turns) > 2 and trajectory.branch_starts == [0]
    assert all(turn.valid_action for turn in trajectory.turns)
