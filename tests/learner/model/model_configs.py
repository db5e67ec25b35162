"""The shapes of the models of the recipes in conf/, from the config.json that each is published with."""

from typing import Any


def sizes(hidden: int, intermediate: int, *, layers: int, heads: int) -> dict[str, Any]:
    widths = {"hidden_size": hidden, "intermediate_size": intermediate}
    return widths | {"num_hidden_layers": layers, "num_attention_heads": heads}


QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "num_key_value_heads": 8}
QWEN3 |= {"vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000, "tie_word_embeddings": True}
QWEN3_MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4}
QWEN3_MOE |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
QWEN3_MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 64, "rms_norm_eps": 1e-5}
LLAMA |= {"tie_word_embeddings": True}
LLAMA3 = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 8192}
# By the name of the folder in `model.path`.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN3 | sizes(1024, 3072, layers=28, heads=16),
    "Qwen3-1.7B": QWEN3 | sizes(2048, 6144, layers=28, heads=16),
    "Qwen3-4B": QWEN3 | sizes(2560, 9728, layers=36, heads=32),
    "Qwen3-8B": QWEN3 | sizes(4096, 12288, layers=36, heads=32) | {"tie_word_embeddings": False},
    "Qwen3-30B-A3B": QWEN3 | sizes(2048, 6144, layers=48, heads=32) | QWEN3_MOE,
    "SmolLM2-135M-Instruct": LLAMA
    | sizes(576, 1536, layers=30, heads=9)
    | {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000},
    "Llama-3.2-1B-Instruct": LLAMA | sizes(2048, 8192, layers=16, heads=32) | LLAMA3 | {"rope_scaling": LLAMA3_ROPE},
}
