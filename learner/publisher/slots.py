"""The memory that the learner shares with its publisher process, as one rank of the learner writes it.

A slot contains one version: the tensors of the layout, each at its offset. Every rank maps all slots, and writes its
part of each tensor. Where the tensors are on a GPU, CUDA pins the pages that this rank writes, so that it copies to
them at the speed of the bus and without the host.
"""

import logging
import mmap
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from common.anonymous_memory import Mapped
from common.weights import TensorEntry

log = logging.getLogger(__name__)

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
            spans = [span for places in self._places for span in spans_of(places.values())]
            self.pinned = PinnedPages(spans, device=torch.cuda.current_device())


class PinnedPages:
    """Pages of this process that CUDA has pinned, until `close`.

    A thread of its own makes every call. CUDA keeps the error of a failed call for the thread that made it, and torch
    would raise it from that thread's next kernel, as it cannot clear it: this thread has no kernels.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], *, device: int) -> None:
        """Begin to pin `spans`, each an address and a number of bytes, for the GPU of that index."""
        self.spans = spans
        self._device = device
        self.num_bytes = 0  # pinned so far
        self.settled = threading.Event()  # set once everything is pinned, or CUDA has refused
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pin-slots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Unpin all; the pages must not be a copy's target any more."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)  # of this thread; otherwise it would start a context on GPU 0
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        pinned = list[int]()
        for address, num_bytes in self.spans:
            if self._closing.is_set():
                break
            if code := int(runtime.cudaHostRegister(address, num_bytes, 0)):
                log.warning(
                    "CUDA cannot pin memory for published weights: cudaHostRegister returned %d for %d bytes, after %d "
                    "bytes; copies of weights to the rest are right, and slower",
                    code,
                    num_bytes,
                    self.num_bytes,
                )
                break
            pinned.append(address)
            self.num_bytes += num_bytes
        self.settled.set()
        self._closing.wait()
        for address in pinned:
            runtime.cudaHostUnregister(address)


def spans_of(places: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """The address and bytes of whole pages that contain `places`; no page is in two spans, no place in parts of two."""
    page, spans = mmap.PAGESIZE, list[tuple[int, int]]()
    for place in sorted((each for each in places if each.nbytes), key=torch.Tensor.data_ptr):
        first, end = place.data_ptr() // page * page, -(-(place.data_ptr() + place.nbytes) // page) * page
        if spans and first <= sum(spans[-1]):  # the end of the span before
            first, _ = spans.pop()
        spans.append((first, end - first))
    return spans


def _places(slot: Mapped, entries: Sequence[TensorEntry], own: OwnRows) -> dict[str, torch.Tensor]:
    """A rank's part of each tensor of a slot, by name, as views of its memory."""
    flat, places = torch.frombuffer(slot, dtype=torch.uint8), dict[str, torch.Tensor]()
    for entry in entries:
        if entry.name in own:
            data = flat[entry.offset : entry.offset + entry.num_bytes]
            place, rows = data.view(TORCH_DTYPES[entry.dtype]).view(entry.shape), own[entry.name]
            places[entry.name] = place if rows is None else place[rows]
    return places
