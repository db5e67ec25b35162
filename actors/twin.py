"""A second set of weights for a serving model: loaded in the background, and swapped in between two steps.

vLLM's layerwise reload loads and packs every tensor in the model itself, while nothing is generated. Here a twin is
reloaded instead, and only a swap of dictionaries happens between two steps.
"""

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor


def twin_of(model: nn.Module) -> nn.Module:
    """A copy of the module tree `model`: its own parameters and buffers, and everything else shared.

    A module or tensor with two names is also a single one in the twin, and tensors that share memory share it there,
    such as the weights of a convolution and vLLM's view of them. vLLM can reload the twin as it can `model`.
    """
    modules: dict[nn.Module, nn.Module] = {}
    tensors: dict[int, torch.Tensor] = {}  # by the id of the original
    storages: dict[int, torch.UntypedStorage] = {}  # by the address of the original
    for module in model.modules():
        twin = modules[module] = object.__new__(type(module))
        twin.__dict__ = dict(module.__dict__)
        for kind in ("_parameters", "_buffers"):
            twin.__dict__[kind] = {
                name: _own(tensor, tensors, storages) for name, tensor in module.__dict__[kind].items()
            }
        _reload_as(module, twin)
    for module, twin in modules.items():
        twin.__dict__["_modules"] = {
            name: None if child is None else modules[child] for name, child in module.__dict__["_modules"].items()
        }
    return modules[model]


def forget_reload(twin: nn.Module) -> None:
    """Remove what vLLM keeps to reload `twin`. It refers to the twin, which would never be freed."""
    for module in twin.modules():
        LAYERWISE_INFO.pop(module, None)


def swap(model: nn.Module, twin: nn.Module) -> None:
    """Exchange everything between `model` and its `twin`, except the tree of modules itself.

    That includes packed weights, which are attributes of a module and not parameters.
    """
    for one, other in zip(model.modules(), twin.modules(), strict=True):
        tree, others_tree = one._modules, other._modules
        one.__dict__, other.__dict__ = other.__dict__, one.__dict__
        one._modules, other._modules = tree, others_tree


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


def _reload_as(module: nn.Module, twin: nn.Module) -> None:
    # Copies, because a reload binds the loaders in this description to the module that it loads.
    info = get_layerwise_info(module)
    described = tuple({name: to_meta_tensor(tensor) for name, tensor in kind.items()} for kind in info.restore_metadata)
    get_layerwise_info(twin).restore_metadata = described
    get_layerwise_info(twin).restore_device = info.restore_device
