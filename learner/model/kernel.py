"""Which kernel computes the attention of a model on a device, and whether sequences can share keys there."""

from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from learner.model.attention import CannotPack, check_kernel, check_shared_keys

PACKED_ATTENTION = "slipstream_packed"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def attention_for(device: torch.device, dtype: str) -> str:
    """The name under which transformers finds the attention: flash-attn's where it is installed, else ours."""
    # flash-attn's kernels support only half precision.
    if device.type == "cuda" and dtype == "bfloat16" and find_spec("flash_attn") is not None:
        return "flash_attention_2"
    return PACKED_ATTENTION


def checked_kernel(causal_lm: PreTrainedModel, device: torch.device, dtype: str) -> str:
    """The name of the kernel that will compute the attention. Raises CannotPack if none runs."""
    if causal_lm.config._attn_implementation != PACKED_ATTENTION:
        return "flash-attn, for the whole pack"
    return check_kernel(device, DTYPES[dtype], head_dim=head_dim_of(causal_lm))


def refuses_shared_keys(causal_lm: PreTrainedModel, device: torch.device, dtype: str) -> str:
    """Why the attention cannot take keys that sequences share; "" if it can."""
    if causal_lm.config._attn_implementation != PACKED_ATTENTION:
        return "the flash-attn package is installed; without it, PyTorch's flash attention would share their keys"
    try:
        check_shared_keys(device, DTYPES[dtype], head_dim=head_dim_of(causal_lm))
    except (CannotPack, RuntimeError, TypeError) as error:  # TypeError: see `check_kernel`
        return " ".join(str(error).split())
    return ""


def head_dim_of(causal_lm: PreTrainedModel) -> int:
    """The size of an attention head; the largest one where layers differ, as those of Gemma 4."""
    # The attention modules know it. A configuration may have no such key, and one of layers that differ refuses it.
    found = [getattr(module, "head_dim", None) for module in causal_lm.modules()]
    config = causal_lm.config.get_text_config()
    sizes = [size for size in found if isinstance(size, int)]
    return max(sizes, default=int(config.hidden_size // config.num_attention_heads))
