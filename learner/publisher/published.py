"""The tensors that are published of a model: its weights, as the actors' engines use them, or only the adapters.

Weights are rounded to the dtype of the forward pass (`model.dtype`), as the engines would round them. In bfloat16 a
step of RL changes about one in a hundred of them, so deltas are small; in float32 it changes nearly all. Adapters are
published in float32: each actor adds them to the weights in its own copy of the model's folder.
"""

from collections.abc import Iterator

from torch import Tensor

from common.model_folder import folder_root
from common.weights import DOWN, UP, Adapted, TensorEntry, layout
from learner.model.lora import adapters_of
from learner.model.packed_model import DTYPES, PackedModel, named_shards, whole


def published_layout(model: PackedModel, *, dtype: str) -> list[TensorEntry]:
    """Name, shape and bytes of each of `published_tensors`, in their order. Gathers nothing."""
    published_dtype = "float32" if adapters_of(model.causal_lm) else dtype
    return layout((name, published_dtype, tuple(shard.shape)) for name, shard in _published_shards(model))


def published_tensors(model: PackedModel, *, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `published_layout`, gathered from the ranks one at a time.

    Gathering is collective: every rank iterates to the end. A tensor that the caller drops is freed before the next.
    """
    published_dtype = "float32" if adapters_of(model.causal_lm) else dtype
    for name, shard in _published_shards(model):
        yield name, whole(shard.detach().to(DTYPES[published_dtype]))


def adapted_folder(model: PackedModel) -> Adapted | None:
    """The base of the published adapters; None if full weights are published. Reads the whole folder of the model."""
    scalings = {adapter.scaling for adapter in adapters_of(model.causal_lm).values()}
    if not scalings:
        return None
    (scaling,) = scalings  # all adapters have the same rank and alpha
    return Adapted(root=folder_root(model.folder), scaling=scaling)


def _published_shards(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards, under the names of the Hugging Face folder, which vLLM's `load_weights` expects."""
    shards = dict(named_shards(model))  # sharded again, even if a forward pass left parameters gathered
    adapters = adapters_of(model.causal_lm)
    if not adapters:
        yield from shards.items()
    for name, adapter in adapters.items():
        yield name + DOWN, adapter.down
        yield name + UP, adapter.up
