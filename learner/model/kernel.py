"""How a model is computed on a device: which kernel its attention has, shared keys there, and compiled layers.

torch.compile makes the same results up to rounding, with fewer passes over memory. Layers of the same shape share
compiled code, which works for packs of any length. Attention is not compiled (see
`slipstream.learner.model.attention`), so the code of a layer has two parts: before and after the attention.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from transformers import PreTrainedModel

from slipstream.common.process.config_error import ConfigError
from slipstream.learner.batch.pack import Packed
from slipstream.learner.model.attention import (
    CannotPack,
    PackRows,
    SharedKeys,
    check_kernel,
    check_shared_keys,
    rows_of,
)
from slipstream.learner.model.context_attention import check_heads
from slipstream.learner.model.states import stateful_kinds

BACKEND = "inductor"  # of torch.compile
PACKED_ATTENTION = "slipstream_packed"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def attention_for(causal_lm: PreTrainedModel, device: torch.device, dtype: str) -> str:
    """The name under which transformers finds the attention: flash-attn's where it is installed, else ours."""
    # flash-attn's kernels support only half precision, and no sinks.
    half = device.type == "cuda" and dtype == "bfloat16"
    if half and find_spec("flash_attn") is not None and not has_sinks(causal_lm):
        return "flash_attention_2"
    return PACKED_ATTENTION


def check_shares(causal_lm: PreTrainedModel, context_ranks: int) -> None:
    """Raise CannotPack unless so many ranks can share a micro-batch: see `slipstream.learner.ranks.context`."""
    if context_ranks == 1:
        return
    if stateful_kinds(causal_lm):
        raise CannotPack(
            f"its layers carry a state from token to token, so `learner.context_ranks` must be 1, got {context_ranks}"
        )
    config = causal_lm.config.get_text_config()
    check_heads(
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        context_ranks,
    )


def has_sinks(causal_lm: PreTrainedModel) -> bool:
    """Whether its softmax of attention has a further, learned score for each head, as in gpt-oss."""
    return any(name.endswith(".sinks") for name, _ in causal_lm.named_parameters())


def checked_kernel(causal_lm: PreTrainedModel, device: torch.device, dtype: str) -> str:
    """What will compute the attention, and layers that carry a state. Raises CannotPack if no kernel runs."""
    kernel = "flash-attn, for the whole pack"
    if causal_lm.config._attn_implementation == PACKED_ATTENTION:
        kernel = check_kernel(device, DTYPES[dtype], head_dim=head_dim_of(causal_lm), with_sinks=has_sinks(causal_lm))
    kinds = stateful_kinds(causal_lm)
    if not kinds:
        return kernel
    return (
        f"{kernel}; {len(kinds)} parts that carry a state ({', '.join(sorted(set(kinds)))}), for rows of similar length"
    )


def refuses_shared_keys(causal_lm: PreTrainedModel, device: torch.device, dtype: str) -> str:
    """Why the attention cannot take keys that sequences share; "" if it can."""
    if causal_lm.config._attn_implementation != PACKED_ATTENTION:
        return "the flash-attn package is installed; without it, PyTorch's flash attention would share their keys"
    try:
        check_shared_keys(device, DTYPES[dtype], head_dim=head_dim_of(causal_lm), with_sinks=has_sinks(causal_lm))
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


def sequence_bounds(packed: Packed) -> dict[str, object]:
    """The bounds of the sequences, as arguments for our attention and for flash-attn's varlen kernels."""
    prefixes, lengths = packed.prefixes, packed.computed_lengths
    keys = None
    if prefixes:
        keys = SharedKeys(places=prefixes.places, bounds=packed.bounds, lengths=packed.lengths)
    bounds = prefixes.bounds if prefixes else packed.bounds
    return {
        "rows": PackRows(rows=rows_of(lengths), shared=keys, context=packed.share.context if packed.share else None),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Make each layer compile its forward and backward pass at the first call."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=BACKEND)


def check_compiler(device: torch.device) -> None:
    """Compile one line of code for `device`. Raises ConfigError if that fails."""
    doubled = torch.compile(lambda numbers: 2 * numbers, backend=BACKEND)
    try:
        doubled(torch.ones(2, device=device))
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        reason = f"{type(inner).__name__}: {inner}".splitlines()[0]
        raise ConfigError(
            f"`learner.compile` must be false if torch.compile does not work, got True ({reason}); install a C++ "
            "compiler and Python's headers (Debian, Ubuntu: apt-get install g++ python3-dev), or set the environment "
            "variable CXX to a compiler"
        ) from error
