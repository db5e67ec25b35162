"""A second set of weights for a model that serves: loaded beside it, and swapped in between two steps.

vLLM's layerwise reload opens the model itself, and every tensor goes through its loaders and is packed while nothing is
generated. A twin is opened instead; what then happens between two steps is a swap of dictionaries.
"""

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor


def twin_of(model: nn.Module) -> nn.Module:
    """A module tree like `model`, with parameters and buffers of its own and everything else shared.

    What is one module or tensor under two names is one in the twin. vLLM knows how to reload it, as it does `model`.
    """
    modules: dict[nn.Module, nn.Module] = {}
    tensors: dict[int, torch.Tensor] = {}  # by the id of the original
    for module in model.modules():
        twin = modules[module] = object.__new__(type(module))
        twin.__dict__ = dict(module.__dict__)
        for kind in ("_parameters", "_buffers"):
            twin.__dict__[kind] = {name: _own(tensor, tensors) for name, tensor in module.__dict__[kind].items()}
        _reload_as(module, twin)
    for module, twin in modules.items():
        twin.__dict__["_modules"] = {
            name: None if child is None else modules[child] for name, child in module.__dict__["_modules"].items()
        }
    return modules[model]


def swap(model: nn.Module, twin: nn.Module) -> None:
    """Give `model` everything of its `twin` and the other way round, but for the tree of modules itself.

    Packed weights are attributes of a module, not parameters, and move along.
    """
    for one, other in zip(model.modules(), twin.modules(), strict=True):
        tree, others_tree = one._modules, other._modules
        one.__dict__, other.__dict__ = other.__dict__, one.__dict__
        one._modules, other._modules = tree, others_tree


def _own(tensor: torch.Tensor | None, known: dict[int, torch.Tensor]) -> torch.Tensor | None:
    if tensor is None:
        return None
    if id(tensor) not in known:
        copy = tensor.data.clone()
        copy.__class__, copy.__dict__ = tensor.__class__, dict(tensor.__dict__)
        known[id(tensor)] = copy
    return known[id(tensor)]


def _reload_as(module: nn.Module, twin: nn.Module) -> None:
    # In copies: a reload ties the loaders that the description names to the module that it opens.
    info = get_layerwise_info(module)
    described = tuple({name: to_meta_tensor(tensor) for name, tensor in kind.items()} for kind in info.restore_metadata)
    get_layerwise_info(twin).restore_metadata = described
    get_layerwise_info(twin).restore_device = info.restore_device
