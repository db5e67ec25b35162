"""A model's tensors as its Hugging Face folder stores them, which is also how vLLM's loaders expect them.

transformers renames some tensors when it loads a folder, and merges others: all experts of a layer are one tensor in
memory, and one each in the folder. Here each tensor is converted back alone, so that a model is never copied whole.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def stored(causal_lm: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The folder's tensors that `tensors` become, which have the names that transformers has in memory.

    A tensor that the caller drops is freed before the next one is taken.
    """
    names = stored_names(causal_lm)
    for name, tensor in tensors:
        yield from converted(causal_lm, names, name, tensor)
        del tensor


def stored_names(causal_lm: PreTrainedModel) -> dict[str, str | None]:
    """By its name in memory, the folder's name of each tensor that is stored as it is; None if it is converted."""
    shapes = _shapes(causal_lm)
    kept = {id(tensor): name for name, tensor in revert_weight_conversion(causal_lm, dict(shapes)).items()}
    return {name: kept.get(id(shape)) for name, shape in shapes.items()}


def converted(
    causal_lm: PreTrainedModel, names: dict[str, str | None], name: str, tensor: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """The folder's tensors that one tensor becomes; `names` are those of `stored_names`, and any other name stays."""
    stored_name = names.get(name, name)
    if stored_name is None:
        yield from revert_weight_conversion(causal_lm, {name: tensor}).items()
    else:
        yield stored_name, tensor


def stored_buffers(causal_lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a folder stores beside the parameters, by their names in memory; each rank has them whole.

    Such as a bias by which experts are chosen, or a scale of a layer's output: without it a model is another one.
    """
    for prefix, module in causal_lm.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def stored_in_parts(causal_lm: PreTrainedModel) -> list[str]:
    """The names in the folder of the tensors that are parts of a larger one in memory: those of experts."""
    names = list[str]()
    for name, shape in _shapes(causal_lm).items():
        parts = dict(revert_weight_conversion(causal_lm, {name: shape}))
        names += parts if len(parts) > 1 else []
    return names


def is_of_adapter(name: str) -> bool:
    """Whether the parameter `name` belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def folder_name(name: str) -> str:
    """The name of the frozen parameter `name` in the Hugging Face folder."""
    return name.replace(".base_layer.", ".")


def _shapes(causal_lm: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors without memory, for every tensor of the folder, by name in memory."""
    parameters = [
        (folder_name(name), tensor) for name, tensor in causal_lm.named_parameters() if not is_of_adapter(name)
    ]
    return {
        name: torch.empty(tensor.shape, device="meta") for name, tensor in (*parameters, *stored_buffers(causal_lm))
    }
