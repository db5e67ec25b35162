"""An answer of a policy, divided into thought, content and tool calls; and how tools and calls are written as text.

As text, a policy reads and writes them whatever its chat template knows of tools.
"""

import json
from collections.abc import Sequence

import msgspec

from slipstream.common.records.message import Message, valid_json, valid_text

_ARGUMENTS = ("arguments", "parameters", "args", "input")  # where publishers write the arguments of a call
_BESIDE = {"name", "function", "type", "id", "call_id", "tool_call_id", "index", *_ARGUMENTS}


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, as the policy wrote it: neither the name nor the arguments need be valid."""

    name: str
    arguments: str  # JSON

    def __post_init__(self) -> None:
        """Make name and arguments valid Unicode, also what a reader of the arguments gets."""
        msgspec.structs.force_setattr(self, "name", valid_text(self.name))
        msgspec.structs.force_setattr(self, "arguments", valid_json(self.arguments))


class ParsedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a parser found in an answer."""

    reasoning: str
    content: str  # without the reasoning and the calls that were understood
    tool_calls: list[ToolCall]
    malformed: bool  # a call was begun and not understood, names no tool, or its arguments are no JSON object

    def __post_init__(self) -> None:
        """Make the texts valid Unicode."""
        msgspec.structs.force_setattr(self, "reasoning", valid_text(self.reasoning))
        msgspec.structs.force_setattr(self, "content", valid_text(self.content))


def with_tools(messages: Sequence[Message], tools: Sequence[object]) -> tuple[Message, ...]:
    """The messages with a paragraph about the tools that can be called, at the end of their system message."""
    described = "\n".join(
        [
            "These tools can be called:",
            *(json.dumps(tool, ensure_ascii=False, default=str) for tool in tools),
            'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.',
        ]
    )
    if messages[0].role == "system":
        return (Message("system", f"{messages[0].content}\n\n{described}"), *messages[1:])
    return (Message("system", described), *messages)


def listed_tools(tools: object) -> list[object]:
    """The tools of a row: a list, its JSON, or nothing. Raises ValueError for anything else."""
    found = tools
    try:
        if isinstance(tools, str):
            found = json.loads(tools) if tools.strip() else []
        if isinstance(found, list):  # of objects, or of the JSON of each
            return [json.loads(tool) if isinstance(tool, str) else tool for tool in found]
    except (ValueError, RecursionError):
        pass
    if tools is None:
        return []
    raise ValueError(f"`tools` must be a list, or its JSON, got {tools!r:.80}")


def written_call(call: object) -> str:
    """A call in OpenAI's format as text, between the tags that Hermes and Qwen models write. Raises ValueError."""
    outer = call if isinstance(call, dict) else {}
    function = outer.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a call in `tool_calls` must have a function with a name, got {call!r:.80}")
    fields = outer | function
    arguments = next((fields[key] for key in _ARGUMENTS if fields.get(key) is not None), None)
    if arguments is None and (others := fields.keys() - _BESIDE):
        raise ValueError(f"`{min(others)}` of a call is not read; write its arguments as `arguments`")
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
        called = json.dumps({"name": function["name"], "arguments": found or {}}, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise ValueError(f"the arguments of a call must be JSON, got {arguments!r:.80}") from None
    if not isinstance(found or {}, dict):
        raise ValueError(f"the arguments of a call must be an object, got {found!r:.80}")
    return f"<tool_call>\n{valid_text(called)}\n</tool_call>"
