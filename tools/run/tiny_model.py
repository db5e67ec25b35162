"""Makes a tiny model without a download: a word-level tokenizer, a chat template, and a Qwen3 with random weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_TURN, PADDING, UNKNOWN = "<|end|>", "<|pad|>", "<|unknown|>"
HEAD_DIM = 32  # the smallest that vLLM's attention on a CPU has
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIALS = [PADDING, UNKNOWN, END_OF_TURN, *ROLES]
# Only three tokens around a message: every token costs a tiny model much.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A word is the same token with or without a space before it, so a model that learns to copy needs one token per word.
# Spaces are lost: decoded text has one space between any two words, and environments must accept that.
WORD = Regex(r"\[[A-Z]+\]|[A-Za-z0-9]+|[^\sA-Za-z0-9]")


@dataclass(kw_only=True, frozen=True)
class TinyShape:
    hidden_size: int = 96  # width of the residual stream
    intermediate_size: int = 256  # width of the MLP
    num_layers: int = 3  # decoder layers
    num_heads: int = 3  # attention heads
    num_kv_heads: int = 3  # key-value heads; divides num_heads


def shape_of(depth: int) -> TinyShape:
    """The shape with `depth` layers and heads, and an MLP of 8/3 of the width, in whole lanes."""
    width = depth * HEAD_DIM
    return TinyShape(
        hidden_size=width,
        intermediate_size=8 * width // 3 // 32 * 32,
        num_layers=depth,
        num_heads=depth,
        num_kv_heads=depth,
    )


def make_tiny_model(folder: Path, *, texts: Iterable[str], shape: TinyShape, max_tokens: int, seed: int) -> None:
    """Save a model whose vocabulary is the words of `texts`, with random weights from `seed`."""
    tokenizer = tiny_tokenizer(texts, max_tokens)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=-(-len(tokenizer) // 16) * 16,  # whole SIMD lanes for the output layer
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=HEAD_DIM,
            max_position_embeddings=max_tokens,
            tie_word_embeddings=True,
            # Transformers' default of 0.02 suits widths of thousands; at a width of 100 it costs hundreds of steps.
            initializer_range=shape.hidden_size**-0.5,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
            pad_token_id=tokenizer.convert_tokens_to_ids(PADDING),
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer(texts: Iterable[str], max_tokens: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is the words of `texts`, with a chat template."""
    split = pre_tokenizers.Split(WORD, behavior="removed", invert=True)
    words = {word for text in texts for word, _ in split.pre_tokenize_str(text)}
    vocabulary = {word: index for index, word in enumerate([*SPECIALS, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHAT_TEMPLATE,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        unk_token=UNKNOWN,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )
