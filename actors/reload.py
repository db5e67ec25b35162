"""Loads weights into a vLLM model or its twin, by vLLM's layerwise reload, which also packs them for its kernels.

In the model itself vLLM loads and packs every tensor while nothing is generated. A twin is loaded beside the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import sanitize_layer_refs

from actors.engine import WeightsUnfit
from actors.twin import swap, twin_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """New weights in a twin of the model."""

    switch: Callable[[], None]  # gives the model these weights and the twin the model's; a second call undoes it
    untouched: list[str]  # parameters of the model that its loader took no tensor for


def reload(model: Any, tensors: dict[str, torch.Tensor], model_config: Any) -> list[str]:
    """Load `tensors` into a model, or a twin; return the names of the parameters that its loader took nothing for."""
    initialize_layerwise_reload(model)
    known = [name for name, _ in model.named_parameters()]
    loaded = model.load_weights(tensors.items())
    finalize_layerwise_reload(model, model_config)
    return [] if loaded is None else [name for name in known if name not in loaded]


def reloadable_twin(model: nn.Module) -> nn.Module:
    """A twin of `model` that vLLM can reload as it can `model`."""
    twin = twin_of(model)
    for one, other in zip(model.modules(), twin.modules(), strict=True):
        _reload_as(one, other)
    return twin


def forget_reload(twin: nn.Module) -> None:
    """Remove what vLLM keeps to reload `twin`. It refers to the twin, which would never be freed."""
    for module in twin.modules():
        LAYERWISE_INFO.pop(module, None)


def loaded_on_cpu(model: nn.Module, tensors: dict[str, torch.Tensor], model_config: Any) -> Loaded:
    """Load `tensors` into a new twin of a model on a CPU, whose kernels pack weights into attributes of modules."""
    twin = reloadable_twin(model)
    forget_experts(twin)
    untouched = reload(twin, tensors, model_config)
    check_experts(twin)
    repack_embeddings(twin)
    forget_reload(twin)
    return Loaded(switch=partial(swap, model, twin), untouched=untouched)


def forget_experts(twin: nn.Module) -> None:
    """Make a reload of `twin` pack its experts for the CPU's kernels, which vLLM does only if there is no kernel yet.

    A reload into packed experts copied the plain weights over the packed ones: logits were wrong by 10 nats, without an
    error.
    """
    for module in twin.modules():
        if isinstance(module, FusedMoEMethodBase):
            module.moe_kernel = None


def check_experts(twin: nn.Module) -> None:
    """Raise WeightsUnfit if a reload has not packed the experts again: a forward pass would end the engine.

    Some of vLLM's loaders, such as that of gpt-oss, copy experts past its reload, into tensors without memory.
    """
    if any(isinstance(module, FusedMoEMethodBase) and module.moe_kernel is None for module in twin.modules()):
        raise WeightsUnfit(
            f"vLLM's {type(twin).__name__} cannot load experts while it runs: its loader copies them past vLLM's "
            "reload; train another model, or use a version of vLLM that reloads this one"
        )


def repack_embeddings(model: nn.Module) -> None:
    """Pack the embedding matrices again on a CPU.

    A reload repacks only layers for which a tensor was loaded. A tied output layer has no tensor of its own, and kept
    multiplying by the packed copy of the old weights: logits were wrong by 3 nats, without an error.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


def _reload_as(module: nn.Module, twin: nn.Module) -> None:
    # Copies, because a reload binds the loaders in this description to the module that it loads.
    info = get_layerwise_info(module)
    described = tuple(
        {name: _unbound(to_meta_tensor(tensor), module) for name, tensor in kind.items()}
        for kind in info.restore_metadata
    )
    get_layerwise_info(twin).restore_metadata = described
    get_layerwise_info(twin).restore_device = info.restore_device


def _unbound(described: Any, module: nn.Module) -> torch.Tensor:
    """`described` as it was before `module` itself was reloaded: its loader wrapped, and bound to `module`.

    With these a reload of the twin took no tensor at all, without an error.
    """
    loader = getattr(described, "weight_loader", None)
    if loader is not None:
        while loader.__name__ == "online_process_loader":
            loader = loader.__wrapped__
        described.weight_loader = loader
    unbound: torch.Tensor = sanitize_layer_refs(described, module)
    return unbound
