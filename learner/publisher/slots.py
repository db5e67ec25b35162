"""The memory that the learner shares with its publisher process, as one rank of the learner writes it.

A slot contains one version: the tensors of the layout, each at its offset. Every rank maps all slots, and writes its
part of each tensor. Where the tensors are on a GPU, CUDA pins the pages that this rank writes, so that it copies to
them at the speed of the bus and without the host.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from slipstream.common.transfer.host_memory import Mapped, PinnedPages, spans_of
from slipstream.common.transfer.weights import TensorEntry

OwnRows = Mapping[str, slice | None]  # that a rank writes, by the tensor's name; None: the whole tensor

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class NotTheLayout(ValueError):
    """Tensors that differ from the layout. All of them were taken."""


class Slots:
    """The slots of a run. Pins them in the background after the first version that comes from a GPU."""

    def __init__(self, memory: Sequence[Mapped], entries: Sequence[TensorEntry], *, own: OwnRows) -> None:
        """Write zeros to this rank's part, which no version is in yet.

        Otherwise page faults would make the first copy into each slot several times slower than later ones. And so
        each rank's pages come from the memory that is near to it.
        """
        self._places = [_places(slot, entries, own) for slot in memory]
        for places in self._places:
            for place in places.values():
                place.zero_()
        self.pinned: PinnedPages | None = None  # None before the first version from a GPU

    @torch.no_grad()
    def write(self, slot: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Write this rank's part of each tensor, one at a time; return the number of bytes once all have arrived.

        Raises NotTheLayout if they differ from it, or some are missing; even then it has iterated `tensors` to the end,
        because other ranks may be waiting in a gather.
        """
        places, problem, on_gpu = dict(self._places[slot]), "", False
        for name, tensor in tensors:
            place = places.pop(name, None)
            if place is None or (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
                expected = "no tensor of that name" if place is None else f"{place.dtype} {list(place.shape)}"
                problem = problem or f"{name} is {tensor.dtype} {list(tensor.shape)}; the layout has {expected}"
            else:
                place.copy_(tensor, non_blocking=True)
                on_gpu = on_gpu or tensor.is_cuda
            del tensor  # before the next one is produced
        if on_gpu:
            torch.cuda.current_stream().synchronize()
            self._pin()
        if places and not problem:
            problem = f"a version needs every tensor of the layout; missing: {sorted(places)}"
        if problem:
            raise NotTheLayout(problem)
        return sum(place.nbytes for place in self._places[slot].values())

    def close(self) -> None:
        """Unpin and unmap the memory."""
        if self.pinned is not None:
            self.pinned.close()
        self._places.clear()

    def _pin(self) -> None:
        """Begin to pin the slots, if that has not been done.

        Not before the first version: it would delay that by about as long as it takes, and after it the learner waits
        for the actors anyway.
        """
        if self.pinned is None:
            spans = list[tuple[int, int]]()
            for places in self._places:
                spans += spans_of((place.data_ptr(), place.nbytes) for place in places.values())
            self.pinned = PinnedPages(spans, device=torch.cuda.current_device(), cuda=torch.cuda)


def _places(slot: Mapped, entries: Sequence[TensorEntry], own: OwnRows) -> dict[str, torch.Tensor]:
    """A rank's part of each tensor of a slot, by name, as views of its memory."""
    flat, places = torch.frombuffer(slot, dtype=torch.uint8), dict[str, torch.Tensor]()
    for entry in entries:
        if entry.name in own:
            data = flat[entry.offset : entry.offset + entry.num_bytes]
            place, rows = data.view(TORCH_DTYPES[entry.dtype]).view(entry.shape), own[entry.name]
            places[entry.name] = place if rows is None else place[rows]
    return places
