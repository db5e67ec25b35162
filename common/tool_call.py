"""An answer of a policy, divided into thought, content and tool calls."""

import msgspec


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, as the policy wrote it: neither the name nor the arguments need be valid."""

    name: str
    arguments: str  # JSON


class ParsedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a parser found in an answer."""

    reasoning: str
    content: str  # without the reasoning and the calls that were understood
    tool_calls: list[ToolCall]
    malformed: bool  # a call was begun and not understood, names no tool, or its arguments are no JSON object
