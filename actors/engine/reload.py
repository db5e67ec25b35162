"""Loads weights into a vLLM model or its shadow model, by vLLM's layerwise reload, which packs them for kernels too.

In the model itself vLLM loads and packs every tensor while nothing is generated. A shadow is loaded beside the model.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import sanitize_layer_refs
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

from slipstream.actors.engine.shadow_model import free, shadow_of, swap
from slipstream.actors.weights.refused import WeightsUnfit

GPT_OSS_EXPERTS = {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """New weights in a shadow model."""

    switch: Callable[[], None]  # gives the model these weights and the shadow the model's; a second call undoes it
    untouched: list[str]  # parameters of the model that its loader took no tensor for
    free: Callable[[], None] = lambda: None  # of a shadow that is not kept: its memory, when nothing switches any more


def reload(model: Any, tensors: dict[str, torch.Tensor], model_config: Any) -> list[str]:
    """Load `tensors` into a model, or a shadow; return the names of the parameters that its loader took nothing for."""
    name_loaders(model)
    initialize_layerwise_reload(model)
    known = [name for name, _ in model.named_parameters()]
    loaded = model.load_weights(one_by_one(tensors) if isinstance(model, GptOssForCausalLM) else tensors.items())
    finalize_layerwise_reload(model, model_config)
    copy_sinks(model, tensors)
    return [] if loaded is None else [name for name in known if name not in loaded]


def name_loaders(model: nn.Module) -> None:
    """Give loaders that are partial functions a name, which vLLM's reload asks for (MiniMax M2's norms have such)."""
    for module in model.modules():
        for kind in get_layerwise_info(module).restore_metadata:
            for tensor in kind.values():
                loader = getattr(tensor, "weight_loader", None)
                if isinstance(loader, partial):
                    loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def one_by_one(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors by name, each expert of gpt-oss by itself.

    vLLM's loader copies the tensor of all experts of a layer past its own reload, into a tensor without memory.
    """
    for name, tensor in tensors.items():
        layer, experts, part = name.partition(".mlp.experts.")
        if experts and part in GPT_OSS_EXPERTS:
            yield from ((f"{layer}{experts}{number}.{part}", expert) for number, expert in enumerate(tensor))
        else:
            yield name, tensor


def copy_sinks(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the sinks of gpt-oss into a reloaded model, for the same reason; each worker has those of its heads."""
    for name, sinks in model.named_parameters():
        tensor = tensors.get(name.replace(".attn.sinks", ".self_attn.sinks"))
        if name.endswith(".attn.sinks") and tensor is not None:
            sinks.data.copy_(tensor.narrow(0, get_tensor_model_parallel_rank() * len(sinks), len(sinks)))


def reloadable_shadow(model: nn.Module) -> nn.Module:
    """A shadow of `model` that vLLM can reload as it can `model`."""
    shadow = shadow_of(model)
    for one, other in zip(model.modules(), shadow.modules(), strict=True):
        _reload_as(one, other)
    return shadow


def forget_reload(shadow: nn.Module) -> None:
    """Remove what vLLM keeps to reload `shadow`. It refers to the shadow, which would never be freed."""
    for module in shadow.modules():
        LAYERWISE_INFO.pop(module, None)


def loaded_on_cpu(model: nn.Module, tensors: dict[str, torch.Tensor], model_config: Any) -> Loaded:
    """Load `tensors` into a new shadow of a model on a CPU, whose kernels pack weights into attributes of modules."""
    shadow = reloadable_shadow(model)
    forget_experts(shadow)
    untouched = reload(shadow, tensors, model_config)
    check_experts(shadow)
    repack_embeddings(shadow)
    give_sinks(model, shadow)
    forget_reload(shadow)
    return Loaded(switch=partial(swap, model, shadow), untouched=untouched, free=partial(free, shadow))


def forget_experts(shadow: nn.Module) -> None:
    """Make a reload of `shadow` pack its experts for the CPU's kernels, which vLLM does only if there is no kernel yet.

    A reload into packed experts copied the plain weights over the packed ones: logits were wrong by 10 nats, without an
    error.
    """
    for module in shadow.modules():
        if isinstance(module, FusedMoEMethodBase):
            module.moe_kernel = None


def check_experts(shadow: nn.Module) -> None:
    """Raise WeightsUnfit if a reload has not packed the experts again: a forward pass would end the engine.

    A loader may copy experts past vLLM's reload, as that of gpt-oss does without `one_by_one`.
    """
    if any(isinstance(module, FusedMoEMethodBase) and module.moe_kernel is None for module in shadow.modules()):
        raise WeightsUnfit(
            f"vLLM's {type(shadow).__name__} cannot load experts while it runs: its loader copies them past vLLM's "
            "reload; train another model, or use a version of vLLM that reloads this one"
        )


def give_sinks(model: nn.Module, shadow: nn.Module) -> None:
    """Let the attention of `shadow` read its own sinks: the implementation, no module, refers to the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = dict(shadow.named_parameters())
    for module in shadow.modules():
        sinks = getattr(module.__dict__.get("impl"), "sinks", None)
        if sinks is None:
            continue
        if id(sinks) not in names:
            raise WeightsUnfit(
                "vLLM's attention keeps a copy of its sinks, of another dtype; set model.dtype to bfloat16 or float32"
            )
        module.__dict__["impl"] = copy.copy(module.__dict__["impl"])
        module.__dict__["impl"].sinks = own[names[id(sinks)]]


def repack_embeddings(model: nn.Module) -> None:
    """Pack the embedding matrices again on a CPU.

    A reload repacks only layers for which a tensor was loaded. A tied output layer has no tensor of its own, and kept
    multiplying by the packed copy of the old weights: logits were wrong by 3 nats, without an error.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


def _reload_as(module: nn.Module, shadow: nn.Module) -> None:
    # Copies, because a reload binds the loaders in this description to the module that it loads.
    info = get_layerwise_info(module)
    described = tuple(
        {name: _unbound(to_meta_tensor(tensor), module) for name, tensor in kind.items()}
        for kind in info.restore_metadata
    )
    get_layerwise_info(shadow).restore_metadata = described
    get_layerwise_info(shadow).restore_device = info.restore_device


def _unbound(described: Any, module: nn.Module) -> torch.Tensor:
    """`described` as it was before `module` itself was reloaded: its loader wrapped, and bound to `module`.

    With these a reload of the shadow took no tensor at all, without an error.
    """
    loader = getattr(described, "weight_loader", None)
    if loader is not None:
        while getattr(loader, "__name__", "") == "online_process_loader":
            loader = loader.__wrapped__
        described.weight_loader = loader
    unbound: torch.Tensor = sanitize_layer_refs(described, module)
    return unbound
