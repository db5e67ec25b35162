"""Makes a tiny model that writes its actions as calls of a tool, which vLLM's parsers `hermes` and `qwen3` read.

Its words have no place for the marks around thoughts and calls, so that each of them is one more token.
"""

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from slipstream.common.config.model_config import TinyModelConfig
from slipstream.common.text.action_format import ACT
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.tools.run.tiny_model import make_tiny_model

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


def make_tiny_caller(folder: Path, *, texts: Iterable[str], config: TinyModelConfig, max_tokens: int) -> None:
    """Save a model whose vocabulary is the words of `texts` and those marks, with random weights."""
    make_tiny_model(folder, texts=texts, config=config, max_tokens=max_tokens, seed=0)
    tokenizer, model = load_tokenizer(folder), Qwen3ForCausalLM.from_pretrained(folder, trust_remote_code=False)
    add_calls(tokenizer)
    tokenizer.save_pretrained(folder)
    model.resize_token_embeddings(-(-len(tokenizer) // 16) * 16)
    model.save_pretrained(folder)


def add_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the marks, and the template that shows calls, to the tokenizer of a tiny model."""
    tokenizer.add_tokens([OPENING, CLOSING, THOUGHT, THOUGHT_END])
    tokenizer.chat_template = TEMPLATE
