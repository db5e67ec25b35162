"""What modules have beside their parameters and buffers: an exchange of contents does not bring it along.

A kernel may keep packed or derived weights there. Such a model must not be refreshed by an exchange: it would serve
weights of two versions.
"""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.actors.engine.exchange import storages_of

Attributes = list[dict[str, Any]]  # of each module of a tree, in its order

# Of these a reload changes the contents by contract, or they say only how far it is.
OTHERS = frozenset(
    {
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_do_torchao_reload",
        "_original_do_torchao_reload",
        "_already_called_process_weights_after_loading",
    }
)
PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


def attributes_of(model: nn.Module) -> Attributes:
    """The attributes of each module now, for `changed_attribute`."""
    return [{name: value for name, value in vars(each).items() if name not in OTHERS} for each in model.modules()]


def changed_attribute(before: Attributes, model: nn.Module) -> str | None:
    """The first attribute that is now another object, unless both are plain or tensors and equal; None if none is."""
    for (path, _), old, new in zip(model.named_modules(), before, attributes_of(model), strict=True):
        for name in sorted(old.keys() | new.keys()):
            if name not in old or name not in new or not _same(old[name], new[name]):
                return f"{path}.{name}".removeprefix(".")
    return None


def derived_tensor(model: nn.Module) -> str | None:
    """A tensor of an object that vLLM processes after each load, and that has memory of its own; None if none has.

    A shadow model shares these objects with its model, such as the implementation of attention. Their
    `process_weights_after_loading` may derive a tensor from the weights that they find, which are the old ones while
    the shadow is loaded.
    """
    known = storages_of(model)
    for path, module in model.named_modules():
        for name, part in vars(module).items():
            if name in OTHERS or isinstance(part, nn.Module) or not hasattr(part, "process_weights_after_loading"):
                continue
            for inner, value in vars(part).items():
                if isinstance(value, Tensor) and value.nbytes and value.untyped_storage().data_ptr() not in known:
                    return f"{path}.{name}.{inner}".removeprefix(".")
    return None


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
        return alike and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, PLAIN) and bool(one == other)
