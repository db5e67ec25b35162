"""Each field of OpenAI's two requests is used, changes nothing, is ignored with a warning, or is refused."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from slipstream.envhub.agent import request
from tests.actors.tool_parsing import LOOK
from tests.envhub.agent import test_agent_endpoint
from tests.envhub.agent.test_agent_endpoint import CHAT, SAMPLING

USED, INERT, WARNED, REFUSED = "used", "inert", "warned", "refused"
TOOLS = "used, with a warning, as these runs have no parser of calls"
BODIES: dict[str, dict[str, Any]] = {"chat/completions": CHAT, "responses": {"input": "hi"}}
PARAMETERS = {
    "chat/completions": chat_create_params.CompletionCreateParamsNonStreaming,
    "responses": response_create_params.ResponseCreateParamsNonStreaming,
}
NONSENSE = 3.5  # for a field that is used
Fields = dict[str, tuple[object, str]]


def all_are(outcome: str, **values: object) -> Fields:
    return {name: (value, outcome) for name, value in values.items()}


OF_ALL = {
    **all_are(INERT, model="gpt-5", user="me"),
    **all_are(USED, stream=False),
    **all_are(WARNED, temperature=0.0, top_p=0.5),
    **all_are(USED, parallel_tool_calls=False, tool_choice="none"),
    **all_are(INERT, prompt_cache_key="k", prompt_cache_options={"mode": "implicit"}, prompt_cache_retention="24h"),
    **all_are(INERT, metadata={"a": "b"}, safety_identifier="me", service_tier="flex", store=True),
    **all_are(REFUSED, moderation={"model": "m"}, top_logprobs=2),
}
FIELDS: dict[str, Fields] = {
    "chat/completions": {
        **OF_ALL,
        **all_are(USED, max_tokens=4, n=2, stream_options={"include_usage": True}),
        **all_are(WARNED, frequency_penalty=0.5, presence_penalty=0.5, seed=3, logit_bias={"5": -100}),
        **all_are(USED, messages=CHAT["messages"], logprobs=True, max_completion_tokens=4, stop=["."]),
        **all_are(TOOLS, tools=[LOOK]),
        **all_are(INERT, prediction={"type": "content", "content": "hi"}),
        **all_are(WARNED, reasoning_effort="low", verbosity="low"),
        **all_are(REFUSED, audio={"voice": "alloy", "format": "wav"}, modalities=["text", "audio"]),
        **all_are(REFUSED, function_call={"name": "look"}, functions=[{"name": "look"}], web_search_options={}),
        **all_are(REFUSED, response_format={"type": "json_object"}),
    },
    "responses": {
        **OF_ALL,
        **all_are(USED, input="hi", instructions="play", max_output_tokens=16),
        **all_are(TOOLS, tools=[{"type": "function", **LOOK["function"]}]),
        **all_are(INERT, access_programs={"cyber": "standard"}, stream_options={"include_obfuscation": False}),
        **all_are(WARNED, reasoning={"effort": "low"}),
        **all_are(REFUSED, background=True, context_management=[{"type": "compaction"}], conversation="conv_1"),
        **all_are(REFUSED, image={"context_compression": "enabled"}, include=["message.output_text.logprobs"]),
        **all_are(REFUSED, max_tool_calls=1, previous_response_id="resp_1", prompt={"id": "pmpt_1"}),
        **all_are(REFUSED, text={"format": {"type": "json_object"}}, truncation="auto"),
    },
}
Posted = Callable[[str, dict[str, Any]], tuple[int, Any, list[str]]]


def post(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return asyncio.run(test_agent_endpoint.post(path, body))


@pytest.fixture
def posted(caplog: pytest.LogCaptureFixture) -> Posted:
    """Posts a body for the first time; returns the status, the answer, and the fields that were warned of."""

    def first(path: str, body: dict[str, Any]) -> tuple[int, Any, list[str]]:
        request._warned.clear()
        with caplog.at_level(logging.WARNING, request.log.name):
            status, answer = post(path, body)
        return status, answer, [record.args[0] for record in caplog.records if record.name == request.log.name]  # type: ignore[index]

    return first


@pytest.mark.parametrize("path", FIELDS)
def test_the_table_has_every_field_of_the_sdk(path: str) -> None:
    assert set(FIELDS[path]) == set(PARAMETERS[path].__annotations__)


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, fields in FIELDS.items() for field in fields])
def test_a_field_does_what_the_table_says(path: str, field: str, posted: Posted) -> None:
    value, outcome = FIELDS[path][field]
    status, answer, warned = posted(path, BODIES[path] | {field: value})
    assert status == (400 if outcome == REFUSED else 200)
    assert warned == ([field] if outcome in (WARNED, TOOLS) else [])
    if outcome == REFUSED:
        assert f"{field}={value!r}"[:40] in answer["error"]["message"]
        assert "is not supported" in answer["error"]["message"]
    if outcome in (USED, TOOLS):
        assert post(path, BODIES[path] | {field: NONSENSE})[0] == 400
    assert post(path, BODIES[path] | {field: None})[0] == (400 if field in BODIES[path] and outcome == USED else 200)


EXTRA: list[tuple[str, object, str]] = [
    *(("top_k", 20, WARNED), ("top_k", SAMPLING.top_k, INERT), ("min_p", 0.1, WARNED), ("priority", 3, INERT)),
    *(("repetition_penalty", 1.1, WARNED), ("thinking_token_budget", 100, WARNED)),
    *(("skip_special_tokens", True, INERT), ("skip_special_tokens", False, REFUSED)),
    *(("ignore_eos", False, INERT), ("ignore_eos", True, REFUSED)),
    *(("min_tokens", 0, INERT), ("min_tokens", 5, REFUSED)),
    *(("stop_token_ids", [], INERT), ("stop_token_ids", [3], REFUSED)),
    *(("bad_words", ["no"], REFUSED), ("allowed_token_ids", [3], REFUSED)),
    *(("guided_json", {"type": "object"}, REFUSED), ("guided_regex", "a+", REFUSED)),
    *(("guided_choice", ["a", "b"], REFUSED), ("structured_outputs", {"regex": "a+"}, REFUSED)),
    *(("chat_template", "{{ messages }}", REFUSED), ("chat_template_kwargs", {"enable_thinking": False}, WARNED)),
    *(("unheard_of", {}, REFUSED), ("unheard_of", None, INERT)),
]


@pytest.mark.parametrize(("field", "value", "outcome"), EXTRA, ids=str)
def test_a_field_of_vllm_does_what_the_table_says(field: str, value: object, outcome: str, posted: Posted) -> None:
    status, answer, warned = posted("chat/completions", CHAT | {field: value})
    assert status == (400 if outcome == REFUSED else 200)
    assert warned == ([field] if outcome == WARNED else [])
    if outcome == REFUSED:
        assert f"{field}={value!r} is not supported by this endpoint; " in answer["error"]["message"]
        is_form = field.startswith(("guided", "structured"))
        assert ("let the prompt ask for the form" in answer["error"]["message"]) == is_form


@pytest.mark.parametrize(
    ("field", "value", "outcome"),
    [
        ("name", "me", USED),
        ("reasoning_content", "hm", USED),
        ("refusal", "no", WARNED),
        ("audio", {"id": "a"}, WARNED),
        ("reasoning", "hm", WARNED),
        ("annotations", [], INERT),
        ("function_call", {"name": "look", "arguments": "{}"}, REFUSED),
    ],
)
def test_no_field_of_a_message_is_lost_without_a_word(field: str, value: object, outcome: str, posted: Posted) -> None:
    body = {"messages": [*CHAT["messages"], {"role": "assistant", "content": None, field: value}]}
    status, _, warned = posted("chat/completions", body)
    assert status == post("chat/completions", body)[0] == (400 if outcome == REFUSED else 200)
    assert warned == ([f"message.{field}"] if outcome == WARNED else [])


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_call_is_refused_with_the_way_round(path: str, choice: object) -> None:
    status, answer = post(path, BODIES[path] | {"tools": FIELDS[path]["tools"][0], "tool_choice": choice})
    assert status == 400
    assert "let the agent's framework send `auto`; docs/agents.md says how in smolagents" in answer["error"]["message"]


def test_tools_whose_calls_no_parser_reads_are_a_fault_once(caplog: pytest.LogCaptureFixture) -> None:
    request._warned.clear()
    with caplog.at_level(logging.WARNING, request.log.name):
        for choice in ("none", "auto", "auto"):
            assert post("chat/completions", CHAT | {"tools": [LOOK], "tool_choice": choice})[0] == 200
    (record,) = caplog.records
    assert "FAULT: an agent's requests have tools, but `model.tool_parser` is empty" in record.getMessage()
