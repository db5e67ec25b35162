"""vLLM's parsers of tool calls and of reasoning, one of each by its name. Only the engine process imports this."""

import json
import logging
from typing import Any

from transformers import PreTrainedTokenizerBase
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import Parser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from slipstream.actors.engine.orders import Parse
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.records.message import bare
from slipstream.common.records.tool_call import ParsedAnswer, ToolCall
from slipstream.common.text.thought import thought_marks
from slipstream.envhub.agent.request import warn_of_unread_calls

HARMONY = {"openai", "openai_gptoss"}  # vLLM parses these by another way, from tokens of its own
# Where vLLM's parsers keep the texts that begin a call: attributes, and names in the table of its newer ones.
CALL_MARKS = (
    "tool_call_start_token",
    "tool_calls_start_token",
    "bot_token",
    "bot_string",
    "tool_start_token",
    "tc_start",
    "tools_open",
    "TOOL_CALLS_BEGIN",
    "_TOOL_CALL_START",
)
CALL_TERMINALS = ("TOOL_START", "TOOL_TOKEN", "TOOL_STRING", "TOOL_SECTION_START", "TOOL_REQUESTS_START")

log = logging.getLogger(__name__)


class AnswerParser:
    """Divides answers by the two parsers, of which one may be missing."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
        """Raises ValueError for names that vLLM does not know, and for parsers that do not fit the tokenizer."""
        tool_parser, reasoning_parser = model.tool_parser, model.reasoning_parser
        _check("model.tool_parser", tool_parser, ToolParserManager.list_registered())
        _check("model.reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered())
        self._tokenizer = tokenizer
        self._template_arguments = model.template_arguments
        try:
            self._kind: type[Parser] = ParserManager.get_parser(
                tool_parser_name=tool_parser or None,
                reasoning_parser_name=reasoning_parser or None,
                enable_auto_tools=True,
            )
            parser = self._parser(_request([]))
            self._call_marks = _call_marks(parser)
        except Exception as error:  # a tokenizer without its tokens, or a package that is missing
            why = " ".join(str(error.__cause__ or error).split())
            raise ValueError(
                f"`model.tool_parser` {tool_parser!r} with `model.reasoning_parser` {reasoning_parser!r} does not work "
                f"with this model: {why}; choose the parsers of its family, or leave them empty"
            ) from error
        _check_thoughts(parser, tokenizer, reasoning_parser)

    def parsed(self, order: Parse) -> ParsedAnswer:
        """Divide an answer. One that the parsers fail at is all content, as in vLLM's own server, and malformed."""
        # Else each malformed call is a traceback in the log. Here, because vLLM resets all levels when it starts; only
        # if it did, because setting a level empties the caches of all loggers.
        if (of_parsers := logging.getLogger("vllm.tool_parsers")).level != logging.CRITICAL:
            of_parsers.setLevel(logging.CRITICAL)
        try:
            request = _request(order.tools)
            parser = self._parser(request)
            if order.tools and parser.tool_parser is None:
                warn_of_unread_calls()
            parser.set_prompt_token_ids(order.prompt)
            reasoning, content, calls = parser.parse(
                order.text, request, enable_auto_tools=bool(order.tools), model_output_token_ids=order.tokens
            )
        except Exception as error:  # the text is the policy's: whatever it makes a parser do, the engine continues
            log.info("an answer cannot be parsed: %s: %s", type(error).__name__, error)
            return ParsedAnswer(reasoning="", content=order.text, tool_calls=[], malformed=True)
        found = [ToolCall(name=call.name, arguments=call.arguments) for call in calls or []]
        said = _without_thought(order.text, reasoning or "", parser)
        if order.tools and not found and self._began_a_call(said, content or "", parser):
            return ParsedAnswer(reasoning=reasoning or "", content=said, tool_calls=[], malformed=True)
        names = {tool["function"]["name"] for tool in order.tools}
        return ParsedAnswer(
            reasoning=reasoning or "",
            content=content or "",
            tool_calls=found,
            malformed=not all(call.name in names and _is_object(call.arguments) for call in found),
        )

    def _began_a_call(self, said: str, content: str, parser: Parser) -> bool:
        # vLLM's newer parsers leave out the parts of calls that they do not understand; an agent shall see them.
        leaves_out = parser.tool_parser is not None and parser.tool_parser.engine_based_streaming
        return any(mark in said for mark in self._call_marks) or (leaves_out and bare(said) != bare(content))

    def _parser(self, request: ChatCompletionRequest) -> Parser:
        # A new one for each answer, as in vLLM's own server: a parser has a state.
        return self._kind(self._tokenizer, request.tools, chat_template_kwargs=self._template_arguments)


def _check(key: str, name: str, known: list[str]) -> None:
    if name and (name not in known or name in HARMONY):
        raise ValueError(
            f"`{key}` must be empty, or one of vLLM's: {', '.join(sorted(set(known) - HARMONY))}; got {name!r}"
        )


def _check_thoughts(parser: Parser, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise ValueError if thoughts are written between marks that the rest of a run does not know.

    It takes them out of text actions, and closes long ones.
    """
    thoughts = parser.reasoning_parser
    begin, end = (thoughts.reasoning_start_str, thoughts.reasoning_end_str) if thoughts else (None, None)
    if begin and end and not any(a.startswith(begin) and b == end for a, b in thought_marks(tokenizer)):
        raise ValueError(
            f"`model.reasoning_parser` {name!r} reads thoughts between {begin!r} and {end!r}, which the chat template "
            "does not have: they would stay in actions; choose the parser of the model's family"
        )


def _request(tools: list[dict[str, Any]]) -> ChatCompletionRequest:
    """The part of a request that parsers look at."""
    return ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=tools or None, model="")


def _call_marks(parser: Parser) -> list[str]:
    """The texts that begin a call; none for a parser that recognises calls by their whole form."""
    tools = parser.tool_parser
    marks = [getattr(tools, name, None) for name in CALL_MARKS]
    engine = getattr(tools, "_parser_engine", None)
    if engine is not None:
        terminals = engine.parser_engine_config.terminals
        marks += [terminals.get(name) for name in CALL_TERMINALS]
    texts = [text for mark in marks for text in (mark if isinstance(mark, tuple | list) else [mark])]
    return [text for text in texts if isinstance(text, str) and text]


def _without_thought(text: str, reasoning: str, parser: Parser) -> str:
    thoughts = parser.reasoning_parser
    end = None if thoughts is None else thoughts.reasoning_end_str
    if end and end in text:
        return text.partition(end)[2]
    return text.partition(reasoning)[2] if reasoning else text


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
