"""What of a model is published: its weights, as the actors' engines hold them, or the adapters alone.

Weights are rounded to the dtype of the forward pass (`model.dtype`), as the engines would round them. In bfloat16 a
step of RL changes one in a hundred of them, so that they travel as deltas; in float32 it changes nearly all. Adapters
are published in float32: each actor adds them to the weights of its own copy of the model's folder.
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
    """What the layout says, each whole, one at a time.

    Gathering is collective: every rank iterates to the end. What the caller lets go of is freed before the next.
    """
    published_dtype = "float32" if adapters_of(model.causal_lm) else dtype
    for name, shard in _published_shards(model):
        yield name, whole(shard.detach().to(DTYPES[published_dtype]))


def adapted_folder(model: PackedModel) -> Adapted | None:
    """What published adapters belong to; None where whole weights are published. Reads the folder through."""
    scalings = {adapter.scaling for adapter in adapters_of(model.causal_lm).values()}
    if not scalings:
        return None
    (scaling,) = scalings  # of one rank and one alpha
    return Adapted(root=folder_root(model.folder), scaling=scaling)


def _published_shards(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """The names are those of the Hugging Face folder, which vLLM's `load_weights` takes."""
    shards = dict(named_shards(model))  # the ranks' shards, also where a forward pass left parameters whole
    adapters = adapters_of(model.causal_lm)
    if not adapters:
        yield from shards.items()
    for name, adapter in adapters.items():
        yield name + DOWN, adapter.down
        yield name + UP, adapter.up
