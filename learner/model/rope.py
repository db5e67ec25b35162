"""Fixes rotary frequencies that depend on the sequence length, once for a whole run, as vLLM does.

transformers chooses them in every forward pass, by the longest sequence of the row; in a pack that may be another
sequence. vLLM, the actors' engine, chooses them when it loads the model, and so must the learner.
"""

import math
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.common.process.config_error import ConfigError
from slipstream.learner.model.attention import CannotPack


def fix_frequencies(causal_lm: PreTrainedModel, *, max_tokens: int | None) -> None:
    """Fix the frequencies of each rotary embedding of `causal_lm` for all sequences of up to `max_tokens`.

    `longrope` (Phi-3 and Phi-4-mini of 128k) gets its long factors if `max_tokens` is larger than the original context,
    otherwise its short factors. `dynamic` scales nothing within `max_position_embeddings`. Every other type has one set
    of frequencies; only for those may `max_tokens` be None.

    Raises ConfigError for `dynamic` beyond that bound, and CannotPack if vLLM would use other frequencies.
    """
    for module in causal_lm.modules():
        rope_type = vars(module).get("rope_type", "default")
        if rope_type in ("longrope", "dynamic"):
            if max_tokens is None:
                raise ValueError(f"`max_tokens` must be given for a model with rope_type {rope_type}, got None")
            fix = _fix_longrope if rope_type == "longrope" else _check_dynamic
            fix(module, max_tokens)
        elif not isinstance(rope_type, str) and {"longrope", "dynamic"} & set(rope_type.values()):
            raise CannotPack(f"its rotary frequencies depend on the sequence length, by layer: {rope_type}")


def _fix_longrope(module: Any, max_tokens: int) -> None:
    config = module.config
    parameters = config.rope_parameters
    original = parameters["original_max_position_embeddings"]
    stretched = max(1.0, config.max_position_embeddings / original)
    of_vllm = math.sqrt(1 + math.log(stretched) / math.log(original))
    if {"short_mscale", "long_mscale"} & parameters.keys() or not math.isclose(module.attention_scaling, of_vllm):
        raise CannotPack(
            f"its longrope scales attention by {module.attention_scaling:.6g} in transformers, but by {of_vllm:.6g} or "
            "the config's short_mscale and long_mscale in vLLM"
        )
    module.inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](config, module.inv_freq.device, seq_len=max_tokens)
    module.rope_type = "default"  # from now on its forward pass does not choose frequencies


def _check_dynamic(module: Any, max_tokens: int) -> None:
    bound = module.original_max_seq_len
    if max_tokens > bound:
        raise ConfigError(
            f"`model.max_tokens` must be <= {bound} for a model with rope_type dynamic, got {max_tokens} (a longer "
            "sequence changes the frequencies of all others in a pack); lower it, or use a model with rope_type yarn"
        )
