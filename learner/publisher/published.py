"""The tensors that are published of a model: its weights, as the actors' engines use them, or only the adapters.

Weights are rounded to the dtype of the forward pass (`model.dtype`), as the engines would round them. In bfloat16 a
step of RL changes about one in a hundred of them, so deltas are small; in float32 it changes nearly all. Adapters are
published in float32: each actor adds them to the weights in its own copy of the model's folder.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from common.model_folder import folder_root
from common.weights import DOWN, UP, Adapted, TensorEntry, layout
from learner.model.folder_tensors import stored, stored_buffers
from learner.model.kernel import DTYPES
from learner.model.lora import adapters_of
from learner.model.packed_model import PackedModel, name_of
from learner.model.shards import named_shards, whole


def published_layout(model: PackedModel, *, dtype: str) -> list[TensorEntry]:
    """Name, shape and bytes of each of `published_tensors`, in their order. Gathers nothing."""
    if adapters_of(model.causal_lm):
        return layout((name, "float32", tuple(shard.shape)) for name, shard in _adapter_shards(model))
    shapes = (
        (name, torch.empty(shard.shape, dtype=DTYPES[dtype], device="meta")) for name, shard in named_shards(model)
    )
    tensors = stored(model.causal_lm, itertools.chain(shapes, stored_buffers(model.causal_lm)))
    return layout((name, name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors)


@torch.no_grad()
def published_tensors(model: PackedModel, *, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `published_layout`, gathered from the ranks one at a time.

    Gathering is collective: every rank iterates to the end. A tensor that the caller drops is freed before the next.
    Buffers are published as they are, in float32.
    """
    if adapters_of(model.causal_lm):
        for name, shard in _adapter_shards(model):
            yield name, whole(shard)
        return
    gathered = ((name, whole(shard.detach().to(DTYPES[dtype]))) for name, shard in named_shards(model))
    yield from stored(model.causal_lm, itertools.chain(gathered, stored_buffers(model.causal_lm)))


def adapted_folder(model: PackedModel) -> Adapted | None:
    """The base of the published adapters; None if full weights are published. Reads the whole folder of the model."""
    scalings = {adapter.scaling for adapter in adapters_of(model.causal_lm).values()}
    if not scalings:
        return None
    (scaling,) = scalings  # all adapters have the same rank and alpha
    return Adapted(root=folder_root(model.folder), scaling=scaling)


def _adapter_shards(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards of the adapters, each under the name in the folder of the weight that it belongs to."""
    for _ in named_shards(model):  # sharded again, even if a forward pass left parameters gathered
        pass
    for name, adapter in adapters_of(model.causal_lm).items():
        ((weight, _),) = stored(model.causal_lm, [(name, adapter.up)])
        yield weight + DOWN, adapter.down
        yield weight + UP, adapter.up
