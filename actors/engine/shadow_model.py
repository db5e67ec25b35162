"""A second set of weights for a serving model: a copy of its module tree, with tensors of its own."""

import torch
from torch import nn


def shadow_of(model: nn.Module) -> nn.Module:
    """A copy of the module tree `model`: its own parameters and buffers, and everything else shared.

    A module or tensor with two names is also a single one in the shadow, and tensors that share memory share it there,
    such as the weights of a convolution and vLLM's view of them.
    """
    modules: dict[nn.Module, nn.Module] = {}
    tensors: dict[int, torch.Tensor] = {}  # by the id of the original
    storages: dict[int, torch.UntypedStorage] = {}  # by the address of the original
    for module in model.modules():
        shadow = modules[module] = object.__new__(type(module))
        shadow.__dict__ = dict(module.__dict__)
        for kind in ("_parameters", "_buffers"):
            shadow.__dict__[kind] = {
                name: _own(tensor, tensors, storages) for name, tensor in module.__dict__[kind].items()
            }
        shadow.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    for module, shadow in modules.items():
        shadow.__dict__["_modules"] = {
            name: None if child is None else modules[child] for name, child in module.__dict__["_modules"].items()
        }
    return modules[model]


def swap(model: nn.Module, shadow: nn.Module) -> None:
    """Exchange everything between `model` and its `shadow`, except the tree of modules itself.

    That includes packed weights, which are attributes of a module and not parameters. The addresses of the model's
    tensors change; `actors/engine/exchange.py` keeps them.
    """
    for one, other in zip(model.modules(), shadow.modules(), strict=True):
        tree, others_tree = one._modules, other._modules
        one.__dict__, other.__dict__ = other.__dict__, one.__dict__
        one._modules, other._modules = tree, others_tree


def free(shadow: nn.Module) -> None:
    """Free the tensors of a shadow now: its loaders refer to it, so that a garbage collection would free them later."""
    for module in list(shadow.modules()):
        module.__dict__.clear()


def _own(
    tensor: torch.Tensor | None, known: dict[int, torch.Tensor], storages: dict[int, torch.UntypedStorage]
) -> torch.Tensor | None:
    if tensor is None:
        return None
    if id(tensor) not in known:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
        copy = tensor.data.new_empty(0)
        copy.set_(storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
        copy.__class__, copy.__dict__ = tensor.__class__, dict(tensor.__dict__)
        known[id(tensor)] = copy
    return known[id(tensor)]
