"""What of a model is published: its weights, as the actors' engines hold them.

They are rounded to the dtype of the forward pass (`model.dtype`), as the engines would round them. In bfloat16 a step
of RL changes one in a hundred of them, so that they travel as deltas; in float32 it changes nearly all.
"""

from collections.abc import Iterator

from torch import Tensor

from common.weights import TensorEntry, layout
from learner.lora import folder_name, is_of_adapter
from learner.model import DTYPES, PackedModel, merged_shards, named_shards, whole


def published_layout(model: PackedModel, *, dtype: str) -> list[TensorEntry]:
    """Name, shape and bytes of each of `published_tensors`, in their order. Gathers nothing."""
    return layout(
        (folder_name(name), dtype, tuple(shard.shape)) for name, shard in named_shards(model) if not is_of_adapter(name)
    )


def published_tensors(model: PackedModel, *, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Every weight whole, one at a time, adapters merged: the names that vLLM's `load_weights` takes.

    Gathering is collective: every rank iterates to the end. What the caller lets go of is freed before the next.
    """
    for name, shard in merged_shards(model):
        yield name, whole(shard.to(DTYPES[dtype]))
