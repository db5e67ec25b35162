"""Forward passes of a small Qwen3 with a cache for each of several episodes, without the layers of transformers.

Those cost more than the arithmetic of a model of a few layers, and what an earlier turn computed is not computed again.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM


class CachedQwen3:
    """The model of a folder, and the keys and values of `num_rows` texts of at most `max_tokens`."""

    def __init__(self, folder: str | Path, *, num_rows: int, max_tokens: int) -> None:
        """Raises ValueError for another architecture."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        self.config = config = model.config
        if config.model_type != "qwen3":
            raise ValueError(f"studies need a model of type qwen3, got {config.model_type} in {folder}")
        self._weights: dict[str, Tensor] = {name: tensor.detach() for name, tensor in model.named_parameters()}
        # A row is longer than its text: a batch is as wide as its longest part, and what is beyond a part is not read.
        shape = (config.num_hidden_layers, num_rows, 2 * max_tokens, config.num_key_value_heads, config.head_dim)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        frequencies = config.rope_parameters["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.arange(2 * max_tokens)[:, None] * frequencies.repeat(2)
        self._cos, self._sin = angles.cos(), angles.sin()

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = {name: weights[name].clone() for name in self._weights}

    def last_logits(
        self,
        rows: Int[Tensor, " batch"],
        tokens: Int[Tensor, "batch width"],
        *,
        starts: Int[Tensor, " batch"],
        counts: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """Continue the text of each row at `starts` with `counts` tokens; the logits after the last of these."""
        size = (*tokens.shape, -1, self.config.head_dim)
        positions = starts[:, None] + torch.arange(tokens.shape[1])
        width = int((starts + counts).max())
        mask = (torch.arange(width) <= positions[:, :, None])[:, None]
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        hidden = self._weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config.num_hidden_layers):
            normed = self._norm(hidden, f"model.layers.{layer}.input_layernorm")
            queries, keys, values = (self._linear(normed, layer, f"self_attn.{name}_proj").view(size) for name in "qkv")
            queries = _rotated(self._norm(queries, f"model.layers.{layer}.self_attn.q_norm"), cos, sin)
            keys = _rotated(self._norm(keys, f"model.layers.{layer}.self_attn.k_norm"), cos, sin)
            self._keys[layer, rows[:, None], positions] = keys
            self._values[layer, rows[:, None], positions] = values
            mixed = F.scaled_dot_product_attention(
                queries.transpose(1, 2),
                self._keys[layer, :, :width].index_select(0, rows).transpose(1, 2),
                self._values[layer, :, :width].index_select(0, rows).transpose(1, 2),
                attn_mask=mask,
                enable_gqa=True,
            )
            hidden = hidden + self._linear(mixed.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")
            normed = self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm")
            gated = F.silu(self._linear(normed, layer, "mlp.gate_proj")) * self._linear(normed, layer, "mlp.up_proj")
            hidden = hidden + self._linear(gated, layer, "mlp.down_proj")
        last = self._norm(hidden[torch.arange(len(rows)), counts - 1], "model.norm")
        return F.linear(last, self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"]))

    def _norm(self, states: Tensor, name: str) -> Tensor:
        return F.rms_norm(states, states.shape[-1:], self._weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _linear(self, states: Tensor, layer: int, name: str) -> Tensor:
        return F.linear(states, self._weights[f"model.layers.{layer}.{name}.weight"])


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, https://arxiv.org/abs/2104.09864: the halves of each head are the coordinates."""
    one, other = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-other, one], dim=-1) * sin
