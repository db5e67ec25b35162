"""Decodes and checks what an agent sends: the bodies of OpenAI's `/v1/chat/completions`.

Four things can happen to a field. It is used. It changes nothing here. It is ignored with one warning, because the run
decides about sampling. With any other field the request is refused: the agent would rely on what it does not get.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.message import valid_json
from slipstream.common.records.trajectory import Sampling
from slipstream.envhub.name_list import name_list

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
PASSED_ON = ("content", "reasoning_content", "tool_calls", "tool_call_id", "name")  # of a message, to the template
MAX_STOPS = 16
# Fields of all requests that change nothing of what is sampled, so that no warning is needed; and others of some.
INERT_IN_ALL = name_list(
    """
    model, user, metadata, store, service_tier, safety_identifier, prompt_cache_key, prompt_cache_options,
    prompt_cache_retention
    """
)
INERT = (*INERT_IN_ALL, "prediction", "priority", "request_id", "cache_salt")
# Fields about which the run decides, in `sampling` and `model.template_arguments`: they are ignored with a warning.
OF_THE_RUN = name_list(
    """
    temperature, top_p, top_k, min_p, seed, frequency_penalty, presence_penalty, repetition_penalty, logit_bias,
    reasoning_effort, reasoning, verbosity, chat_template_kwargs, thinking_token_budget
    """
)
# Refused fields in which an agent may leave these values. In any field it may leave null.
REFUSED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "echo": (False,),
}
# The same of vLLM's own fields, which clients send as `extra_body`.
OF_VLLM: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("stop_token_ids", "bad_words", "documents"), ([],)),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("continue_final_message", "add_special_tokens", "return_token_ids"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt", "include_reasoning"), (True,)),
    "min_tokens": (0,),
}
STRUCTURED = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
# What to do about a refused field.
LEAVE_OUT = "leave it out, or set what it means for the whole run, in `sampling` or `model.template_arguments`"
INSTEAD = {
    "tool_choice": "let the agent's framework send `auto`; docs/agents.md says how in smolagents and pydantic-ai",
    **dict.fromkeys(("response_format", *STRUCTURED), "let the prompt ask for the form, as answers are sampled freely"),
}

log = logging.getLogger(__name__)
_warned = set[str]()  # the fields about which this process has warned


class Function(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool in OpenAI's format; templates and parsers get the whole object that was sent."""

    type: Literal["function"]
    function: Function


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None

    @property
    def num_answers(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(stop for stop in stops if stop)

    @property
    def longest(self) -> int | None:
        """The largest number of tokens of an answer, if the request has a limit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def max_calls(self) -> int | None:
        """The largest number of tool calls in an answer; None if the request sets no limit."""
        return 1 if self.parallel_tool_calls is False else None

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools whose calls are looked for in an answer."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reward: float | dict[str, float]


Body = TypeVar("Body", bound=msgspec.Struct)


def decoded(
    body: bytes,
    kind: type[Body],
    sampling: Sampling,
    *,
    refused: Mapping[str, tuple[Any, ...]] = REFUSED,
    inert: Collection[str] = INERT,
) -> Body:
    """Decode a request. Raises ValueError, with the reason, if it is malformed or asks for what cannot be done."""
    try:
        fields = msgspec.json.decode(valid_json(body.decode()), type=dict[str, Any])
        request = msgspec.convert(fields, type=kind)
        if isinstance(request, ChatRequest):
            msgspec.convert(request.tools or [], type=list[Tool])
    except MALFORMED as error:
        raise ValueError(f"malformed request: {error}") from error
    neutral = OF_VLLM | dict(refused)
    known = {*kind.__struct_fields__, *inert, *OF_THE_RUN} - neutral.keys()
    for name in sorted(fields.keys() - known):
        if fields[name] is not None and fields[name] not in neutral.get(name, ()):
            instead = INSTEAD.get(name, LEAVE_OUT)
            raise ValueError(f"{name[:100]}={_short(fields[name])} is not supported by this endpoint; {instead}")
    if isinstance(request, ChatRequest) and len(request.stops) > MAX_STOPS:
        raise ValueError(f"stop must have at most {MAX_STOPS} texts, got {len(request.stops)}")
    _warn_of_ignored(fields, sampling=sampling)
    return request


def decoded_reward(body: bytes) -> float | dict[str, float]:
    """Decode the body of `/v1/reward`. Raises ValueError."""
    try:
        return msgspec.json.decode(body, type=RewardRequest).reward
    except MALFORMED as error:
        raise ValueError(
            f'malformed reward, expected {{"reward": 1.0}} or {{"reward": {{NAME: 1.0}}}}: {error}'
        ) from error


def _warn_of_ignored(fields: Mapping[str, Any], *, sampling: Sampling) -> None:
    of_the_run = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    for name in (fields.keys() & OF_THE_RUN) - _warned:
        if fields[name] is None or (name in of_the_run and fields[name] == of_the_run[name]):
            continue
        _warned.add(name)
        log.warning(
            "an agent's requests set %s=%s, which is ignored: the run's `sampling` and `model.template_arguments` "
            "decide; this warning is shown once",
            name,
            _short(fields[name]),
        )


def warn_of_unread_calls() -> None:
    """Warn once that the run reads no calls of the tools that a request has."""
    if "tools" not in _warned:
        _warned.add("tools")
        log.warning(
            "FAULT: an agent's requests have %s, but `model.tool_parser` is empty, so the agent gets calls as text; "
            "set the parser of the model's family; this warning is shown once",
            "tools",
        )


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them. Raises ValueError for a role or content that none can render."""
    return [_template_message(message) for message in messages]


def _template_message(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"the role of a message must be one of {', '.join(ROLES)}, got {_short(role)}")
    if message.get("function_call"):
        raise ValueError("function_call of a message is not supported; send it in tool_calls")
    given = {name for name, value in message.items() if value not in (None, "", [], {})}
    for name in sorted({f"message.{name}" for name in given - {"role", *PASSED_ON}} - _warned):
        _warned.add(name)
        log.warning("an agent's requests have %s, which is not read; this warning is shown once", name)
    passed = {name: message[name] for name in PASSED_ON if message.get(name) is not None}
    if role != "assistant" or message.get("content") is not None:
        passed["content"] = text_of(message.get("content") or "")
    elif "content" in message:
        passed["content"] = None  # a template may ask for it: an answer of calls has no text, not even an empty one
    if "tool_calls" in passed:
        try:
            calls = msgspec.convert(passed["tool_calls"], type=list[dict[str, Any]])
        except MALFORMED as error:
            raise ValueError(f"tool_calls of a message must be a list of objects: {error}") from error
        passed["tool_calls"] = [_with(valid_json, call) for call in calls]
    return {"role": ROLES[role], **passed}


def text_of(content: Any, kinds: Collection[str] = ("text",)) -> str:
    """The text of `content`, which may be in parts of these kinds. Raises ValueError for anything else."""
    if isinstance(content, str):
        return content
    try:
        parts = msgspec.convert(content, type=list[dict[str, Any]])
        texts = [part["text"] for part in parts if part.get("type") in kinds and isinstance(part.get("text"), str)]
    except MALFORMED:
        parts, texts = [{}], []
    if len(texts) < len(parts):
        raise ValueError(f"content must be text, or parts of type {', '.join(kinds)}, got {_short(content)}")
    return "".join(texts)


def with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as objects, for templates that do not take JSON in a string."""
    return [
        {**each, "tool_calls": [_with(json.loads, call) for call in each["tool_calls"]]}
        if "tool_calls" in each
        else each
        for each in map(dict, messages)
    ]


def _with(read: Callable[[str], Any], call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are what `read` makes of their text; as it was if that is not possible."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": read(function["arguments"])}}
    except (ValueError, RecursionError):
        return call


def _short(value: Any) -> str:
    return repr(value)[:200]
