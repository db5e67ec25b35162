"""Each field of OpenAI's three requests is used, changes nothing, is ignored with a warning, or is refused."""

import logging
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from slipstream.envhub.agent import request
from tests.actors.tool_parsing import LOOK
from tests.envhub.agent.test_agent_endpoint import CHAT, SAMPLING, TEXT, post

USED, INERT, WARNED, REFUSED = "used", "inert", "warned", "refused"
TOOLS = "used, with a warning, as these runs have no parser of calls"
BODIES: dict[str, dict[str, Any]] = {"chat/completions": CHAT, "completions": TEXT, "responses": {"input": "hi"}}
PARAMETERS = {
    "chat/completions": chat_create_params.CompletionCreateParamsNonStreaming,
    "completions": completion_create_params.CompletionCreateParamsNonStreaming,
    "responses": response_create_params.ResponseCreateParamsNonStreaming,
}
NONSENSE = 3.5  # for a field that is used
# By request: a value that an agent may send in the field, and what becomes of it.
Fields = dict[str, tuple[object, str]]
OF_ALL: Fields = {
    "model": ("gpt-5", INERT),
    "stream": (False, USED),
    "temperature": (0.0, WARNED),
    "top_p": (0.5, WARNED),
    "user": ("me", INERT),
}
OF_BOTH_COMPLETIONS: Fields = {
    "frequency_penalty": (0.5, WARNED),
    "logit_bias": ({"5": -100}, WARNED),
    "max_tokens": (4, USED),
    "n": (2, USED),
    "presence_penalty": (0.5, WARNED),
    "seed": (3, WARNED),
    "stream_options": ({"include_usage": True}, USED),
}
OF_CHAT_AND_RESPONSES: Fields = {
    "metadata": ({"a": "b"}, INERT),
    "moderation": ({"model": "m"}, REFUSED),
    "parallel_tool_calls": (False, USED),
    "prompt_cache_key": ("k", INERT),
    "prompt_cache_options": ({"mode": "implicit"}, INERT),
    "prompt_cache_retention": ("24h", INERT),
    "safety_identifier": ("me", INERT),
    "service_tier": ("flex", INERT),
    "store": (True, INERT),
    "tool_choice": ("none", USED),
    "top_logprobs": (2, REFUSED),
}
FIELDS: dict[str, Fields] = {
    "chat/completions": {
        **OF_ALL,
        **OF_BOTH_COMPLETIONS,
        **OF_CHAT_AND_RESPONSES,
        "messages": (CHAT["messages"], USED),
        "audio": ({"voice": "alloy", "format": "wav"}, REFUSED),
        "function_call": ({"name": "look"}, REFUSED),
        "functions": ([{"name": "look"}], REFUSED),
        "logprobs": (True, USED),
        "max_completion_tokens": (4, USED),
        "modalities": (["text", "audio"], REFUSED),
        "prediction": ({"type": "content", "content": "hi"}, INERT),
        "reasoning_effort": ("low", WARNED),
        "response_format": ({"type": "json_object"}, REFUSED),
        "stop": (["."], USED),
        "tools": ([LOOK], TOOLS),
        "verbosity": ("low", WARNED),
        "web_search_options": ({}, REFUSED),
    },
    "completions": {
        **OF_ALL,
        **OF_BOTH_COMPLETIONS,
        "prompt": ("hi", USED),
        "best_of": (2, REFUSED),
        "echo": (True, REFUSED),
        "logprobs": (1, USED),
        "stop": (".", USED),
        "suffix": (".", REFUSED),
    },
    "responses": {
        **OF_ALL,
        **OF_CHAT_AND_RESPONSES,
        "access_programs": ({"cyber": "standard"}, INERT),
        "background": (True, REFUSED),
        "context_management": ([{"type": "compaction"}], REFUSED),
        "conversation": ("conv_1", REFUSED),
        "image": ({"context_compression": "enabled"}, REFUSED),
        "include": (["message.output_text.logprobs"], REFUSED),
        "input": ("hi", USED),
        "instructions": ("play", USED),
        "max_output_tokens": (16, USED),
        "max_tool_calls": (1, REFUSED),
        "previous_response_id": ("resp_1", REFUSED),
        "prompt": ({"id": "pmpt_1"}, REFUSED),
        "reasoning": ({"effort": "low"}, WARNED),
        "stream_options": ({"include_obfuscation": False}, INERT),
        "text": ({"format": {"type": "json_object"}}, REFUSED),
        "tools": ([{"type": "function", **LOOK["function"]}], TOOLS),
        "truncation": ("auto", REFUSED),
    },
}
CASES = [(path, field) for path, fields in FIELDS.items() for field in fields]


@pytest.mark.parametrize("path", FIELDS)
def test_the_table_has_every_field_of_the_sdk(path: str) -> None:
    assert set(FIELDS[path]) == set(PARAMETERS[path].__annotations__)


@pytest.mark.parametrize(("path", "field"), CASES)
def test_a_field_does_what_the_table_says(path: str, field: str, caplog: pytest.LogCaptureFixture) -> None:
    value, outcome = FIELDS[path][field]
    request._warned.clear()
    with caplog.at_level(logging.WARNING, request.log.name):
        status, answer = post(path, BODIES[path] | {field: value})
    assert status == (400 if outcome == REFUSED else 200)
    warned = [record.args[0] for record in caplog.records if record.name == request.log.name]  # type: ignore[index]
    assert warned == ([field] if outcome in (WARNED, TOOLS) else [])
    if outcome == REFUSED:
        assert f"{field}={value!r}"[:40] in answer["error"]["message"]
        assert "is not supported" in answer["error"]["message"]
    if outcome in (USED, TOOLS):
        assert post(path, BODIES[path] | {field: NONSENSE})[0] == 400
    assert post(path, BODIES[path] | {field: None})[0] == (400 if field in BODIES[path] and outcome == USED else 200)


# What a client of vLLM sends as `extra_body`.
EXTRA: list[tuple[str, object, str]] = [
    ("top_k", 20, WARNED),
    ("min_p", 0.1, WARNED),
    ("repetition_penalty", 1.1, WARNED),
    ("thinking_token_budget", 100, WARNED),
    ("chat_template_kwargs", {"enable_thinking": False}, WARNED),
    ("top_k", SAMPLING.top_k, INERT),
    ("skip_special_tokens", True, INERT),
    ("skip_special_tokens", False, REFUSED),
    ("ignore_eos", False, INERT),
    ("ignore_eos", True, REFUSED),
    ("min_tokens", 0, INERT),
    ("min_tokens", 5, REFUSED),
    ("priority", 3, INERT),
    ("stop_token_ids", [], INERT),
    ("stop_token_ids", [3], REFUSED),
    ("bad_words", ["no"], REFUSED),
    ("allowed_token_ids", [3], REFUSED),
    ("guided_json", {"type": "object"}, REFUSED),
    ("guided_regex", "a+", REFUSED),
    ("guided_choice", ["a", "b"], REFUSED),
    ("structured_outputs", {"regex": "a+"}, REFUSED),
    ("chat_template", "{{ messages }}", REFUSED),
]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(("field", "value", "outcome"), EXTRA, ids=str)
def test_a_field_of_vllm_does_what_the_table_says(
    path: str, field: str, value: object, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    request._warned.clear()
    with caplog.at_level(logging.WARNING, request.log.name):
        status, answer = post(path, BODIES[path] | {field: value})
    assert status == (400 if outcome == REFUSED else 200)
    warned = [record.args[0] for record in caplog.records if record.name == request.log.name]  # type: ignore[index]
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
def test_no_field_of_a_message_is_lost_without_a_word(
    field: str, value: object, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    request._warned.clear()
    said = {"role": "assistant", "content": None, field: value}
    with caplog.at_level(logging.WARNING, request.log.name):
        answers = [post("chat/completions", {"messages": [*CHAT["messages"], said]}) for _ in range(2)]
    assert [status for status, _ in answers] == [400 if outcome == REFUSED else 200] * 2
    warned = [record.args[0] for record in caplog.records if record.name == request.log.name]  # type: ignore[index]
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


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("field", ["unheard_of", "n_best"])
def test_an_unknown_field_is_refused(path: str, field: str) -> None:
    status, answer = post(path, BODIES[path] | {field: {}})
    assert status == 400 and f"'{field}' is no field that this endpoint knows" in answer["error"]["message"]
