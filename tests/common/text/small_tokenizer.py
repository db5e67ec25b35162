"""Tokenizers and chat templates of the kinds that models come with, small enough to read."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from slipstream.common.config.env_config import EnvConfig
from slipstream.tools.run.prepare import vocabulary_texts
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model

END = "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: what an assistant thought is shown until the user answers, and gone from then on.
FORGETS_THOUGHTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def merging_tokenizer(template: str) -> PreTrainedTokenizerBase:
    """A BPE of single characters that merges "ab" and " a": sampled apart, they are decoded and encoded as one."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {text: index for index, text in enumerate([*characters, "ab", " a"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), (" ", "a")]))
    tokenizer.decoder = decoders.Fuse()
    return _chat_tokenizer(tokenizer, template)


@cache
def byte_tokenizer(template: str) -> PreTrainedTokenizerBase:
    """A token for every byte, as models of today have: it can write anything, control characters too."""
    vocabulary = {text: index for index, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _chat_tokenizer(tokenizer, template)


@cache
def shop_tokenizer(action_format: str = "plain") -> PreTrainedTokenizerBase:
    """The tokenizer of a tiny model that a run makes for the small shop."""
    with TemporaryDirectory() as folder:
        texts = vocabulary_texts(EnvConfig(max_turns=8, action_format=action_format), 60)
        shape = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
        make_tiny_model(Path(folder), texts=texts, shape=shape, max_tokens=256, seed=0)
        return AutoTokenizer.from_pretrained(folder)


def _chat_tokenizer(tokenizer: Tokenizer, template: str) -> PreTrainedTokenizerBase:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", END, "<|endoftext|>")])
    return chat_tokenizer(tokenizer, template, eos_token=END, pad_token="<|endoftext|>")


def chat_tokenizer(tokenizer: Tokenizer, template: str, **tokens: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model with this chat template and these special tokens."""
    usual: dict[str, Any] = {"chat_template": template, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **usual, **tokens)
