"""The load of the learner's benchmark: models with random weights, and batches with the lengths of agents' episodes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from slipstream.learner.batch.pack import TokenSequence, numbered

LOSS_EVERY = 3  # every third token is sampled, as in the quickstart; the others are observations

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """A distribution of the lengths of sequences."""

    name: str
    draw: Callable[[np.random.Generator, int], Lengths]


def _uniform(rng: np.random.Generator, num: int) -> Lengths:
    return rng.integers(60, 181, num)


def _long_tail(rng: np.random.Generator, num: int) -> Lengths:
    return np.clip(rng.lognormal(np.log(100), 0.8, num), 24, 1024).astype(np.int64)


def _few_long(rng: np.random.Generator, num: int) -> Lengths:
    lengths = rng.integers(60, 141, num)
    lengths[::32] *= 8
    return lengths


UNIFORM = Mix(name="uniform", draw=_uniform)
LONG_TAIL = Mix(name="log-normal", draw=_long_tail)
FEW_LONG = Mix(name="few long", draw=_few_long)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The shape of a Qwen3 to train, and the size of its batches."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_sequences: int  # in a step
    micro_batch_tokens: int
    times_as_long: int = 1  # factor on the lengths of the mix
    dtype: str = "float32"


QUICKSTART = Size(
    name="quickstart",
    vocab_size=64,
    hidden_size=96,
    intermediate_size=256,
    num_layers=3,
    num_heads=3,
    num_kv_heads=3,
    head_dim=32,
    num_sequences=64,
    micro_batch_tokens=3072,
)
LARGER = Size(
    name="5M",
    vocab_size=8_192,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_sequences=32,
    micro_batch_tokens=2048,
)
# The shapes of Qwen2.5 0.5B and 1.5B, for a GPU.
HALF_B = Size(
    name="0.5B",
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    num_sequences=128,
    micro_batch_tokens=32_768,
    times_as_long=16,
    dtype="bfloat16",
)
ONE_AND_A_HALF_B = replace(
    HALF_B, name="1.5B", hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12, head_dim=128
)


def model_config(size: Size) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        initializer_range=size.hidden_size**-0.5,
    )


def save_model(folder: Path, size: Size) -> Path:
    """Write the model into `folder`, without a tokenizer."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(model_config(size)).save_pretrained(folder)
    return folder


def sequences(lengths: Lengths, *, vocab_size: int) -> list[TokenSequence]:
    """Sequences of random tokens, every third sampled by a policy that is uniform over the vocabulary."""
    rng = np.random.default_rng(0)
    return numbered([_sequence(int(length), rng, vocab_size)] for length in lengths)


def _sequence(length: int, rng: np.random.Generator, vocab_size: int) -> TokenSequence:
    loss_mask = np.arange(length) % LOSS_EVERY == LOSS_EVERY - 1
    return TokenSequence(
        tokens=rng.integers(0, vocab_size, length, dtype=np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=np.where(loss_mask, -np.log(vocab_size), 0).astype(np.float32),
        advantages=np.full(length, rng.normal(), dtype=np.float32),
        kept=None,
    )
