"""The tensors that are published of a model: its weights, as the actors' engines use them, or only the adapters.

Weights are rounded to the dtype of the forward pass (`model.dtype`), as the engines would round them. In bfloat16 a
step of RL changes about one in a hundred of them, so deltas are small; in float32 it changes nearly all. Adapters are
published in float32: each actor adds them to the weights in its own copy of the model's folder.

Each rank of rank 0's host writes a part. Of a tensor that the folder stores as it is in memory, that is the rank's
shard, its rows: nothing is gathered. A tensor that is converted for the folder is gathered, and of the tensors that it
becomes, such as one for each expert, each rank writes some. If the ranks are on several hosts, every tensor is
gathered, as a rank cannot write into another host's memory.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slipstream.common.transfer.model_folder import folder_root
from slipstream.common.transfer.weights import DOWN, UP, Adapted, TensorEntry, layout
from slipstream.learner.model.folder_tensors import converted, stored_buffers, stored_names
from slipstream.learner.model.kernel import DTYPES
from slipstream.learner.model.lora import adapters_of
from slipstream.learner.model.packed_model import PackedModel, name_of
from slipstream.learner.model.weight_shards import named_shards, reshard, whole


class Published:
    """The layout of every version of a model, and what this rank writes of it."""

    def __init__(self, model: PackedModel, *, dtype: str, hosts: int = 1) -> None:
        """`hosts` are those that the ranks are on, each with as many. Gathers nothing."""
        self._model = model
        self._dtype = None if adapters_of(model.causal_lm) else DTYPES[dtype]
        self._names = stored_names(model.causal_lm)
        _, shard = next(named_shards(model))
        assert isinstance(shard, DTensor)
        mesh, self._hosts = shard.device_mesh, hosts
        # The writers are the first ranks, which are on rank 0's host.
        part = partial(part_of, rank=mesh.get_local_rank(), num_writers=mesh.size() // hosts)
        tensors = list[tuple[str, Tensor]]()
        self.own: dict[str, slice | None] = {}  # what this rank writes, see `OwnRows`
        for name, source in self._sources():
            shape = torch.empty(source.shape, dtype=self._published_dtype(source), device="meta")
            if (stored_name := self._name_of_shard(name, source)) is not None:
                parts = [(stored_name, shape)]
                self.own[stored_name] = part(len(shape))
            else:
                parts = list(converted(model.causal_lm, self._names, name, shape))
                self.own |= {each: None for each, _ in parts[part(len(parts))]}
            tensors += parts
        self.layout: list[TensorEntry] = layout(
            (name, name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors
        )

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank writes now: the rows in `own` of each of these tensors, by name.

        Gathering is collective: every rank iterates to the end, also one that writes nothing. A tensor that the caller
        drops is freed before the next one is made. Buffers are published as they are, in float32.
        """
        for name, source in self._sources():
            dtype = self._published_dtype(source)
            if (stored_name := self._name_of_shard(name, source)) is not None:
                assert isinstance(source, DTensor)
                yield stored_name, source.to_local().to(dtype)
            else:
                tensor = whole(source.to(dtype)) if isinstance(source, DTensor) else source
                parts = converted(self._model.causal_lm, self._names, name, tensor)
                yield from (part for part in parts if part[0] in self.own)
                del tensor

    def _sources(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors in memory that are published: this rank's shards, then buffers, which every rank has whole."""
        if self._dtype is None:
            yield from _adapter_shards(self._model, self._names)
        else:
            yield from ((name, shard.detach()) for name, shard in named_shards(self._model))
            yield from stored_buffers(self._model.causal_lm)

    def _published_dtype(self, source: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and isinstance(source, DTensor) else source.dtype

    def _name_of_shard(self, name: str, source: Tensor) -> str | None:
        """The published name of a tensor of which each rank writes its shard; None if it is gathered."""
        by_rows = isinstance(source, DTensor) and source.placements[0].is_shard(0)  # not a transposed adapter
        return self._names.get(name, name) if by_rows and self._hosts == 1 else None


def part_of(number: int, *, rank: int, num_writers: int) -> slice:
    """Which of `number` rows or tensors a rank writes: of rows those that FSDP gives to it, which chunks.

    Of 5 rows 2 writers write rows 0 to 2 and 3 to 4. A rank that is no writer writes none.
    """
    chunk = -(-number // num_writers)
    first = min(rank * chunk, number)
    return slice(first, min(first + chunk, number))


def adapted_folder(model: PackedModel) -> Adapted | None:
    """The base of the published adapters; None if full weights are published. Reads the whole folder of the model."""
    scalings = {adapter.scaling for adapter in adapters_of(model.causal_lm).values()}
    if not scalings:
        return None
    (scaling,) = scalings  # all adapters have the same rank and alpha
    return Adapted(root=folder_root(model.folder), scaling=scaling)


def _adapter_shards(model: PackedModel, names: dict[str, str | None]) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards of the adapters, each under the name in the folder of the weight that it belongs to."""
    reshard(model)
    for name, adapter in adapters_of(model.causal_lm).items():
        weight = names[name]
        assert weight is not None, f"{name} has an adapter, and is not stored as it is"
        yield weight + DOWN, adapter.down.detach()
        yield weight + UP, adapter.up.detach()
