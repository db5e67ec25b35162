"""This rank's shards of a model's weights, and the whole tensors of its Hugging Face folder, gathered from them."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from slipstream.common.transfer.weights import TensorEntry, layout
from slipstream.learner.model.folder_tensors import folder_name, is_of_adapter, stored, stored_buffers
from slipstream.learner.model.lora import adapters_of
from slipstream.learner.model.packed_model import PackedModel, name_of


def named_shards(model: PackedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's float32 shard of every parameter, by name, including adapters and frozen weights.

    A head that is tied to the embedding is yielded only once.
    """
    reshard(model)
    yield from model.causal_lm.named_parameters()
    yield from model.heads()


def reshard(model: PackedModel) -> None:
    """Shard the parameters again: a forward pass without a backward pass leaves them gathered, in its dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_layout(model: PackedModel) -> list[TensorEntry]:
    """Name, shape and bytes of each of `full_tensors`, in their order. Gathers nothing."""
    shapes = (
        (folder_name(name), torch.empty(shard.shape, device="meta"))
        for name, shard in named_shards(model)
        if not is_of_adapter(name)
    )
    tensors = stored(model.causal_lm, itertools.chain(shapes, stored_buffers(model.causal_lm)))
    return layout((name, name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors)


def full_tensors(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model's Hugging Face folder, gathered one at a time in float32, under its name there.

    Adapters are merged into their weights. Gathering is collective: every rank iterates to the end. A tensor that the
    caller drops is freed before the next one is gathered.
    """
    gathered = ((name, whole(shard)) for name, shard in merged_shards(model))
    yield from stored(model.causal_lm, itertools.chain(gathered, stored_buffers(model.causal_lm)))


@torch.no_grad()
def merged_shards(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """This rank's shard of every weight with adapters merged, by its name without adapters. Collective."""
    reshard(model)  # so that the adapters' parameters are shards too
    adapters = adapters_of(model.causal_lm)
    for name, shard in named_shards(model):
        if not is_of_adapter(name):
            adapter = adapters.get(folder_name(name))
            yield folder_name(name), shard.detach() if adapter is None else adapter.merged(shard.detach())


def whole(shard: Tensor) -> Tensor:
    """The full tensor, gathered from the ranks' shards. Collective."""
    detached = shard.detach()
    assert isinstance(detached, DTensor)
    return detached.full_tensor()
