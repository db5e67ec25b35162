"""Tiny models with random weights of the families that people train, in shapes that vLLM's CPU build runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel

from slipstream.learner.batch.pack import TokenSequence
from slipstream.learner.model.skeleton import auto_class
from slipstream.tools.run.tiny_model import END_OF_TURN, tiny_tokenizer

MAX_TOKENS = 160
WINDOW = 24  # narrower than the probe
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [first + second for first in LETTERS for second in LETTERS[:8]]

COMMON: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_TOKENS,
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
ROUTED: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
CORRECTED: Mapping[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # vLLM reads both, as released
RELEASED_MINIMAX: Mapping[str, Any] = {
    "rotary_dim": 16,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
}  # as above
LATENT: Mapping[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
}
WINDOWED: Mapping[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# Else each layer has an embedding of its own of 262,144 tokens, half a gigabyte in all.
EMBEDDED_PER_LAYER: Mapping[str, Any] = {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16}
LINEAR: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
# vLLM's CPU build computes linear attention in bfloat16 alone, with heads of 64 and more.
WIDER: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
CONVOLVED: Mapping[str, Any] = {
    "layer_types": ["conv", "full_attention"],
    "conv_dim": 64,
    "block_dim": 64,
    "block_multiple_of": 32,
}  # vLLM reads the sizes, as released
IMAGES: Mapping[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "patch_size": 14}
QWEN_IMAGES: Mapping[str, Any] = {**IMAGES, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
QWEN_IDS: Mapping[str, Any] = {
    "image_token_id": 3,
    "video_token_id": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
}
MAMBA: Mapping[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_d_head": 32,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
LIKE_GPT2: Mapping[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": MAX_TOKENS}


def rope(rope_type: str, **parameters: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


SCALED_GPT_OSS = rope(
    "yarn", factor=4.0, original_max_position_embeddings=40, beta_fast=32.0, beta_slow=1.0, truncate=False
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A tiny model of an architecture: what its configuration has besides, or instead of, `COMMON`."""

    model_type: str  # as transformers calls it
    settings: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # keys of `COMMON` that it cannot take
    dtype: str = "float32"  # of the forward pass, in learner, engine and transformers


def _family(
    model_type: str, *settings: Mapping[str, Any], without: tuple[str, ...] = (), dtype: str = "float32"
) -> Family:
    merged = {name: value for part in settings for name, value in part.items()}
    return Family(model_type=model_type, settings=merged, without=without, dtype=dtype)


FAMILIES = {
    "llama": _family("llama"),
    "llama, rope llama3": _family(
        "llama",
        rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama, rope yarn": _family("llama", rope("yarn", factor=4.0, original_max_position_embeddings=40)),
    "qwen2": _family("qwen2"),
    "qwen3": _family("qwen3"),
    "mistral": _family("mistral", {"sliding_window": WINDOW}),
    "ministral3": _family("ministral3"),
    "gemma": _family("gemma"),
    "gemma2": _family("gemma2", {"sliding_window": WINDOW}),
    "gemma3_text": _family("gemma3_text", WINDOWED),
    "gemma4_text": _family("gemma4_text", WINDOWED, EMBEDDED_PER_LAYER),
    "phi": _family("phi", without=("num_key_value_heads",)),
    "phi3": _family("phi3"),
    "olmo": _family("olmo"),
    "olmo2": _family("olmo2"),
    "olmo3": _family("olmo3", WINDOWED),
    "glm": _family("glm"),
    "glm4": _family("glm4"),
    "smollm3": _family("smollm3"),
    "granite": _family("granite"),
    "granite, scaled logits": _family("granite", {"logits_scaling": 4.0}),
    "cohere2": _family("cohere2", {"sliding_window": WINDOW}),
    "exaone4": _family("exaone4", WINDOWED),
    "seed_oss": _family("seed_oss"),
    "ernie4_5": _family("ernie4_5"),
    "starcoder2": _family("starcoder2", {"sliding_window": None}),
    "apertus": _family("apertus"),
    "gpt2": _family("gpt2", LIKE_GPT2),
    "gpt_neox": _family("gpt_neox"),
    "opt": _family("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "mixtral": _family("mixtral", EXPERTS),
    "qwen2_moe": _family("qwen2_moe", EXPERTS, {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": _family("qwen3_moe", EXPERTS, {"norm_topk_prob": True}),
    "olmoe": _family("olmoe", EXPERTS),
    "phimoe": _family("phimoe", EXPERTS, {"moe_intermediate_size": 96}),
    "granitemoe": _family("granitemoe", EXPERTS),
    "minimax_m2": _family("minimax_m2", EXPERTS, RELEASED_MINIMAX),
    "glm4_moe": _family("glm4_moe", ROUTED),
    "glm4_moe_lite": _family("glm4_moe_lite", ROUTED, LATENT, without=("head_dim",)),
    "dots1": _family("dots1", ROUTED),
    "ernie4_5_moe": _family("ernie4_5_moe", {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32}),
    "deepseek_v2": _family("deepseek_v2", ROUTED, LATENT),
    "deepseek_v3": _family("deepseek_v3", ROUTED, LATENT, CORRECTED, without=("head_dim",)),
    "gpt_oss": _family("gpt_oss", EXPERTS, WINDOWED, SCALED_GPT_OSS),
    "qwen3, bfloat16": _family("qwen3", WIDER, dtype="bfloat16"),
    "gpt_oss, bfloat16": _family("gpt_oss", EXPERTS, WINDOWED, WIDER, SCALED_GPT_OSS, dtype="bfloat16"),
    "qwen3_next, bfloat16": _family("qwen3_next", EXPERTS, LINEAR, WIDER, dtype="bfloat16"),
    "qwen3_5_text, bfloat16": _family("qwen3_5_text", LINEAR, WIDER, dtype="bfloat16"),
    "qwen3_5_moe_text, bfloat16": _family("qwen3_5_moe_text", EXPERTS, LINEAR, WIDER, dtype="bfloat16"),
    "olmo_hybrid, bfloat16": _family("olmo_hybrid", LINEAR, WIDER, {"num_key_value_heads": 2}, dtype="bfloat16"),
    "lfm2": _family("lfm2", CONVOLVED),
    "lfm2, one head": _family("lfm2", CONVOLVED, {"num_attention_heads": 1, "head_dim": 64}),
    "lfm2_moe": _family("lfm2_moe", EXPERTS, CONVOLVED, {"num_dense_layers": 1}),
    "jamba": _family("jamba", {"num_experts": 2, "mamba_d_state": 16, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "bamba": _family("bamba", MAMBA, {"attn_layer_indices": [1]}),
    "granitemoehybrid": _family(
        "granitemoehybrid",
        EXPERTS,
        MAMBA,
        {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32, "position_embedding_type": "rope"},
    ),
    "falcon_h1": _family("falcon_h1", MAMBA, {"mamba_d_ssm": 128}),
    "nemotron_h": _family(
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "gemma3, with images": _family(
        "gemma3",
        {
            "text_config": WINDOWED,
            "vision_config": {**IMAGES, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
            "mm_tokens_per_image": 4,
            "image_token_index": 3,
        },
    ),
    "qwen2_5_vl": _family(
        "qwen2_5_vl",
        QWEN_IDS,
        {
            "text_config": rope("default", mrope_section=[4, 6, 6]),
            "vision_config": {**QWEN_IMAGES, "fullatt_block_indexes": [0]},
        },
    ),
    "qwen3_5, with images, bfloat16": _family(
        "qwen3_5",
        QWEN_IDS,
        {
            "text_config": {**LINEAR, **WIDER, **rope("default", mrope_section=[8, 12, 12], partial_rotary_factor=1.0)},
            "vision_config": {**QWEN_IMAGES, "out_hidden_size": 128, "num_position_embeddings": 16},
        },
        dtype="bfloat16",
    ),
    "deepseek_v32": _family(
        "deepseek_v32",
        ROUTED,
        LATENT,
        CORRECTED,
        {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 8},
        without=("head_dim",),
    ),
    "phi3, rope longrope": _family(
        "phi3",
        rope(
            "longrope",
            original_max_position_embeddings=8,
            short_factor=[1.0 + 0.1 * place for place in range(16)],
            long_factor=[1.5 + place for place in range(16)],
        ),
        {"original_max_position_embeddings": 8},
    ),
    "falcon": _family("falcon", without=("head_dim",)),
    "llama4_text": _family("llama4_text", EXPERTS, {"attention_chunk_size": 8, "intermediate_size_mlp": 96}),
}


def save_tiny(family: Family, folder: Path) -> Path:
    """Write a model of `family` with random weights, biases, norms and buffers, and a tokenizer.

    The values are large enough that a wrong or missing tensor moves the log-probabilities by tenths of nats and more.
    """
    tokenizer = tiny_tokenizer(WORDS, MAX_TOKENS)
    ends = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(END_OF_TURN) for name in ("pad", "bos", "eos")}
    known = {"vocab_size": -(-len(tokenizer) // 64) * 64} | ends | dict(COMMON)
    settings = {name: value for name, value in known.items() if name not in family.without} | dict(family.settings)
    if "text_config" in family.settings:
        settings = {**family.settings, "text_config": known | family.settings["text_config"]}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **settings)
    causal_lm = auto_class(config).from_config(
        config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    randomise(causal_lm)
    causal_lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def randomise(causal_lm: PreTrainedModel) -> None:
    """Give every parameter and every stored buffer a value of its own."""
    stored = causal_lm.state_dict(keep_vars=True)
    for tensor in {id(tensor): tensor for tensor in stored.values()}.values():
        if tensor.ndim > 1:
            tensor.normal_(std=0.15)
        elif tensor.is_floating_point():
            tensor.add_(torch.randn_like(tensor), alpha=0.1)


def sequence(length: int, *, seed: int, tokens: list[int] | None = None, prompt: int = 1) -> TokenSequence:
    """`length` random tokens, or `tokens`, of which the first `prompt` are not scored."""
    random = np.random.default_rng(seed).integers(8, len(WORDS), length)
    array = np.array(random if tokens is None else tokens, dtype=np.int32)
    return TokenSequence(
        tokens=array,
        loss_mask=np.arange(len(array)) >= prompt,
        behaviour_logprobs=np.zeros(len(array), dtype=np.float32),
        advantages=np.zeros(len(array), dtype=np.float32),
        kept=None,
    )
