"""OpenAI's `/v1/responses`: its requests as those of chat completions, and answers as its items and events.

Nothing is kept between two requests: an agent sends the whole conversation each time.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.envhub.agent.request import INERT_IN_ALL, ChatRequest, Tool, text_of
from slipstream.envhub.agent.response import MODEL, Answer

# Fields that change nothing of what is sampled.
INERT = (*INERT_IN_ALL, "access_programs", "stream_options")
# Refused fields in which an agent may leave these values. In any field it may leave null.
REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto", "none"),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "include": ([], ["reasoning.encrypted_content"]),  # thoughts are sent whole
    "context_management": ([],),
}
MESSAGE_PARTS = ("input_text", "output_text", "text")


class CallItem(msgspec.Struct, frozen=True, kw_only=True):
    call_id: str
    name: str
    arguments: str


class CallOutputItem(msgspec.Struct, frozen=True, kw_only=True):
    call_id: str
    output: Any


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    input: str | Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = False

    def as_chat(self) -> ChatRequest:
        """Return the same request to chat completions. Raises ValueError for items and tools that it does not have."""
        try:
            tools = [_chat_tool(tool) for tool in self.tools or []]
            messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
            messages += messages_of(self.input)
        except MALFORMED as error:
            raise ValueError(f"malformed request: {error}") from error
        return ChatRequest(
            messages=messages,
            tools=tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            max_tokens=self.max_output_tokens,
            stream=self.stream,
        )


def messages_of(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages that the items stand for. Thought, text and calls of one answer are one message again.

    Raises ValueError for an item that no message can show, and one of MALFORMED for a damaged one.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages = list[dict[str, Any]]()
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            result = msgspec.convert(item, type=CallOutputItem)
            content = text_of(result.output, MESSAGE_PARTS)
            messages.append({"role": "tool", "tool_call_id": result.call_id, "content": content})
        elif kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": text_of(item.get("content"), MESSAGE_PARTS)})
        elif kind in ("message", "reasoning", "function_call"):
            _add_part(messages, kind, item)
        else:
            raise ValueError(f"an item of input has the type {str(kind)[:100]!r}, which this endpoint does not have")
    return messages


def _add_part(messages: list[dict[str, Any]], kind: str, item: Mapping[str, Any]) -> None:
    """Add a part of an answer to the last message, or begin another answer if it cannot follow what is there."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    is_begun = last is not None and ("content" in last or "tool_calls" in last)
    if last is None or (is_begun and kind != "function_call"):
        last = {"role": "assistant"}
        messages.append(last)
    if kind == "reasoning":
        thought = text_of(item.get("content") or "", ("reasoning_text",))
        last["reasoning_content"] = last.get("reasoning_content", "") + thought
    elif kind == "message":
        last["content"] = text_of(item.get("content"), MESSAGE_PARTS)
    else:
        call = msgspec.convert(item, type=CallItem)
        function = {"name": call.name, "arguments": call.arguments}
        calls = last.get("tool_calls", [])
        last["tool_calls"] = [*calls, {"id": call.call_id, "type": "function", "function": function}]


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ValueError(f"a tool has the type {tool.get('type')!r:.100}; this endpoint has functions only")
    chat = {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
    msgspec.convert(chat, type=Tool)
    return chat


def response_body(request: ResponsesRequest, answer: Answer, *, num_prompt_tokens: int) -> dict[str, Any]:
    """The whole response. Token counts have no details: they are 0."""
    is_cut = answer.finish_reason == "length"
    num_sampled = len(answer.tokens)
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": MODEL,
        "instructions": request.instructions,
        "tools": request.tools or [],
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "metadata": {},
        "output": list(_items(answer)),
        "usage": {
            "input_tokens": num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt_tokens + num_sampled,
        },
    }


def _items(answer: Answer) -> Iterator[dict[str, Any]]:
    status = "incomplete" if answer.finish_reason == "length" else "completed"

    def item(prefix: str, kind: str, **fields: Any) -> dict[str, Any]:
        return {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": status, **fields}

    if answer.reasoning:
        thought = [{"type": "reasoning_text", "text": answer.reasoning}]
        yield item("rs", "reasoning", summary=[], content=thought)
    if answer.text or not answer.tool_calls:
        text = [{"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}]
        yield item("msg", "message", role="assistant", content=text)
    for call in answer.tool_calls:
        yield item("fc", "function_call", call_id=call["id"], **call["function"])


def events(response: dict[str, Any]) -> Iterator[bytes]:
    """The events of a stream. The answer is complete before it is sent, so each text is one delta."""
    for number, (kind, fields) in enumerate(_events(response)):
        event = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        yield b"event: " + kind.encode() + b"\ndata: " + event + b"\n\n"


def _events(response: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    for place, item in enumerate(response["output"]):
        at = {"output_index": place}
        inside = {**at, "item_id": item["id"]}
        is_call = item["type"] == "function_call"
        empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        opened = item | {"status": "in_progress"} | empty
        yield "response.output_item.added", {**at, "item": opened}
        if is_call:
            yield "response.function_call_arguments.delta", {**inside, "delta": item["arguments"]}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**inside, **done}
        elif item["type"] == "message":
            (part,) = item["content"]
            inside |= {"content_index": 0}
            yield "response.content_part.added", {**inside, "part": part | {"text": ""}}
            yield "response.output_text.delta", {**inside, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**inside, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**inside, "part": part}
        yield "response.output_item.done", {**at, "item": item}
    yield f"response.{response['status']}", {"response": response}
