"""vLLM's parsers without an engine, a chat template with tools, and a policy that writes what its script says."""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.orders import Parse
from slipstream.actors.engine.vllm_environment import vllm_environment
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.records.tool_call import ParsedAnswer
from tests.common.text.small_tokenizer import merging_tokenizer

Parsing = Callable[..., Any]

# As Qwen2.5's and Hermes's: calls are written as JSON between marks; a thought is shown if it is sent back.
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message.get('reasoning_content') %}<think>{{ message['reasoning_content'] }}</think>{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}\n<tool_call>\n"
    '{"name": {{ call["function"]["name"] | tojson }}, "arguments": {{ call["function"]["arguments"] | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3-Coder's: calls are written with a mark for each argument.
QWEN_XML = (
    HERMES.partition("\n<tool_call>")[0]
    + "\n<tool_call>\n<function={{ call['function']['name'] }}>\n"
    + "{% for name, value in call['function']['arguments'].items() %}"
    + "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    + HERMES.partition("</tool_call>")[2]
)
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


def parsing(
    tool_parser: str = "hermes", reasoning_parser: str = "", tokenizer: PreTrainedTokenizerBase | None = None
) -> Parsing:
    with mock.patch.dict(os.environ, vllm_environment()):  # later processes of this worker shall not inherit it
        from slipstream.actors.engine.vllm_parsers import AnswerParser  # vLLM reads the environment when imported

        model = ModelConfig(tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        parser = AnswerParser(tokenizer or merging_tokenizer(HERMES), model)

    async def parse(text: str, *, tokens: list[int], prompt: list[int], tools: list[dict[str, Any]]) -> ParsedAnswer:
        return parser.parsed(Parse(call=0, prompt=prompt, tokens=tokens, text=text, tools=tools))

    return parse
