"""A small Qwen3 and what learner tests feed it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slipstream.common.records.trajectory import Trajectory
from slipstream.common.text.tokenizer import absent_ids
from slipstream.learner.batch.pack import TokenSequence
from slipstream.learner.model.packed_model import ModelSettings
from tests.replay.records.attempts import attempt_at, lease_of, ticket

VOCAB_SIZE = 200
SCALING_VOCAB_SIZE = 64
FLOAT32 = ModelSettings(dtype="float32", temperature=1.0, chunk_tokens=4)  # fewer than a sequence has


def save_tiny_model(folder: Path, *, tie: bool = True, seed: int = 0, **changes: object) -> Path:
    """Write a Qwen3 of 2 layers with random weights, large enough that every token has its own log-probability."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    settings = sizes | heads | {"max_position_embeddings": 512, "tie_word_embeddings": tie, "initializer_range": 0.2}
    Qwen3ForCausalLM(Qwen3Config(**(settings | changes))).save_pretrained(folder)
    return folder


def save_scaling_model(folder: Path) -> Path:
    """Write a model that scales its logits, which the learner's forward pass leaves out."""
    torch.manual_seed(0)
    sizes = {"vocab_size": SCALING_VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    scales = {"final_logit_softcapping": 1.0, "attn_logit_softcapping": None, "initializer_range": 0.5}
    Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, **scales)).save_pretrained(folder)
    return folder


def random_sequence(length: int, *, seed: int, prompt: int = 3) -> TokenSequence:
    """`length` random tokens of which the first `prompt` are not trained; behaviour log-probs and advantages too."""
    rng = np.random.default_rng(seed)
    loss_mask = np.arange(length) >= prompt
    return TokenSequence(
        tokens=rng.integers(0, VOCAB_SIZE, length, dtype=np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=np.where(loss_mask, rng.normal(-5, 1, length), 0).astype(np.float32),
        advantages=np.full(length, rng.normal(), dtype=np.float32),
        kept=None,
    )


def a_trajectory(*, tokens: bytes, behaviour_logprobs: bytes, loss_mask: bytes, branch_starts: list[int]) -> Trajectory:
    arrays = {"tokens": tokens, "behaviour_logprobs": behaviour_logprobs, "loss_mask": loss_mask}
    bare = {"turns": [], "version_spans": [], "score": 0.0, "success": False}
    return replace(attempt_at(lease_of(ticket(0)), 0, run_id="run"), branch_starts=branch_starts, **arrays, **bare)


def without_absent(model: Any, folder: Path) -> Any:
    """`model`, which gives ids that the tokenizer in `folder` lacks the probability 0, as engine and learner do."""
    absent = absent_ids(folder, model.config.vocab_size)

    def mask(_: Any, __: Any, found: Any) -> Any:
        found.logits[..., absent] = -math.inf
        return found

    model.register_forward_hook(mask)
    return model


@pytest.fixture
def any_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's made-up sequences have ids that its model's tokenizer lacks."""
    monkeypatch.setattr("slipstream.learner.model.packed_model.absent_ids", lambda folder, num_rows: [])
