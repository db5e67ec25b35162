"""A model's twin, which is loaded beside it, leaves nothing behind when it is replaced."""

import gc
import weakref

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info

from actors.twin import forget_reload, swap, twin_of


def reloaded_twin(model: nn.Module) -> nn.Module:
    """As after a reload: what vLLM keeps of each layer has a loader that is bound to the layer."""
    twin = twin_of(model)
    for layer in twin.modules():
        (parameters, _) = get_layerwise_info(layer).restore_metadata
        for tensor in parameters.values():
            tensor.weight_loader = layer.forward
    return twin


def test_a_twin_that_was_swapped_in_and_out_is_freed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for layer in model.modules():
        weights = {name: tensor.to("meta") for name, tensor in layer._parameters.items() if tensor is not None}
        get_layerwise_info(layer).restore_metadata = (weights, {})
    num_known, freed = len(LAYERWISE_INFO), []
    for version in range(5):
        twin = reloaded_twin(model)
        with torch.no_grad():
            twin[0].weight.fill_(version)
        forget_reload(twin)
        swap(model, twin)
        assert model[0].weight.unique().tolist() == [version]
        freed.append(weakref.ref(twin[1]))
        del twin
        gc.collect()
    assert [reference() for reference in freed] == [None] * 5
    assert len(LAYERWISE_INFO) == num_known
