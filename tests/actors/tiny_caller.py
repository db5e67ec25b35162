"""Makes the tokenizer of a tiny model write actions as calls of a tool, which vLLM's parsers `hermes` and `qwen3` read.

Its words have no place for the marks around thoughts and calls, so that each of them is one more token.
"""

from transformers import PreTrainedTokenizerBase

from slipstream.common.text.action_format import ACT

NAME = ACT["function"]["name"]
OPENING, CLOSING = '<tool_call>{"name":"' + NAME + '","arguments":{"action":"', '"}}</tool_call>'
THOUGHT, THOUGHT_END = "<think>", "</think>"
# As the tiny model's own, but results of tools are messages of the user's, and calls are shown as they are written.
TEMPLATE = (
    "{% for message in messages %}<|{{ 'user' if message['role'] == 'tool' else message['role'] }}|>"
    "{% if message.get('reasoning_content') %}<think>{{ message['reasoning_content'] }}</think>{% endif %}"
    "{{ message['content'] }}{% for call in message.get('tool_calls') or [] %}"
    + OPENING.replace(f'"{NAME}"', "\"{{ call['function']['name'] }}\"")
    + "{{ call['function']['arguments']['action'] }}"
    + CLOSING
    + "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def add_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the marks, and the template that shows calls, to the tokenizer of a tiny model."""
    tokenizer.add_tokens([OPENING, CLOSING, THOUGHT, THOUGHT_END])
    tokenizer.chat_template = TEMPLATE
