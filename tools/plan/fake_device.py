"""Runs code for a GPU on a device without memory and kernels: what is where, of which dtype, and how much it takes.

PyTorch's FakeTensorMode knows device, dtype and shape of every tensor and computes no value, so an operation on tensors
of two devices, or of dtypes that do not go together, fails as on a GPU. Added here are the functions of `torch.cuda`
that order work on a device, answers where the host asks for a value, and a count of the bytes alive.

Call `slipstream.tools.plan.fake_cuda.load_backend` before, in a process that does nothing else.
"""

import contextlib
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.learner.ranks.ranks import Ranks, context_of

DEVICE = torch.device("cuda", 0)
ROOM = Path(__file__).parents[2]  # whose code is named as the place of a wait
ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm, ATEN.addmm, ATEN.bmm, ATEN.baddbmm, ATEN._grouped_mm}
# What a host reads of a tensor on a device; a GPU must have computed it. With these answers a step continues as usual.
ANSWERS: dict[str, Any] = {"item": 1.0, "__float__": 1.0, "__int__": 1, "__bool__": False, "__index__": 1}

MASK_ALIGNMENT = 16  # numbers


class Stream:
    """A queue of work on a device that does none."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = DEVICE
        self.stream_id = self.cuda_stream = 0

    def record_event(self, *_: object) -> "Event":
        return Event()

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    """A place in such a queue."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "Event") -> float:
        return 0.0


class Waits(TorchFunctionMode):
    """Answers the host's questions for values on the device, and counts where they are asked: a GPU would make it wait.

    An index by a mask has as many elements as a GPU would find only then: it is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places = Counter[str]()

    def count(self, what: str) -> None:
        """One more wait, in the function of ours that is running."""
        ours = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(ROOM)]
        ours = [frame for frame in ours if "/tools/plan/" not in frame.filename and ".venv" not in frame.filename]
        ours = [frame for frame in ours if frame.name != "<genexpr>"]
        where = f"{Path(ours[-1].filename).relative_to(ROOM)} ({ours[-1].name})" if ours else "elsewhere"
        self.places[f"{what} in {where}"] += 1

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        on_device = isinstance(first, Tensor) and first.device.type == "cuda"
        if isinstance(first, FakeTensor) and (name in ANSWERS or name == "tolist"):
            if on_device:
                self.count(name.strip("_"))
            return np.ones(first.shape).tolist() if name == "tolist" else ANSWERS[name]
        found = func(*args, **(kwargs or {}))
        if on_device and isinstance(found, Tensor) and found.device.type == "cpu":
            self.count("copy to the host")
        return found


class Alive(NamedTuple):
    """The bytes of one storage, and the kind of device that it is on."""

    num_bytes: int
    device: str


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are alive, on the device and on the host, and the highest sum so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = Counter[str]()
        self.peak = Counter[str]()
        self._alive: dict[int, Alive] = {}
        self.counts = True

    def begin_peak(self) -> None:
        """Forget the highest sum so far."""
        self.peak = self.now.copy()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it calls the operation on its local tensors, which are counted
        _check_operands(func, args)
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if self.counts and isinstance(tensor, FakeTensor):
                self._see(tensor.untyped_storage(), tensor.device.type)
        return found

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Resize `storage` and count it again: FSDP frees gathered weights by this, not by dropping them."""
        _RESIZE(storage, num_bytes)
        if storage._cdata in self._alive:
            self._see(storage, self._alive[storage._cdata].device)

    def _see(self, storage: torch.UntypedStorage, device: str) -> None:
        name, num_bytes = storage._cdata, storage.nbytes()
        if name not in self._alive:
            weakref.finalize(storage, self._drop, name)
        self._add(device, num_bytes - self._alive.get(name, Alive(0, device)).num_bytes)
        self._alive[name] = Alive(num_bytes, device)

    def _drop(self, name: int) -> None:
        dropped = self._alive.pop(name)
        self._add(dropped.device, -dropped.num_bytes)

    def _add(self, device: str, num_bytes: int) -> None:
        self.now[device] += num_bytes
        self.peak[device] = max(self.peak[device], self.now[device])


_RESIZE = torch.UntypedStorage.resize_


def _check_operands(func: Any, args: Sequence[Any]) -> None:
    """Raise RuntimeError for operands that a kernel refuses, and PyTorch's computation of shapes does not."""
    tensors = [each for each in args if isinstance(each, Tensor)]
    if func.overloadpacket in PRODUCTS:
        dtypes = {str(each.dtype) for each in tensors if each.is_floating_point()}
        if len(dtypes) > 1:
            raise RuntimeError(f"{func} of {' and '.join(sorted(dtypes))}: the factors must have the same dtype")
    if func.namespace == "torch_attn":
        devices = {each.device.type for each in tensors}
        if len(devices) > 1:
            raise RuntimeError(f"{func} on {' and '.join(sorted(devices))}: all tensors must be on the same device")


class _Paused:
    """Where DTensor computes the shape of a result with tensors of full size, which exist on no device."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __enter__(self) -> None:
        self._memory.counts = False

    def __exit__(self, *_: object) -> None:
        self._memory.counts = True


class FakeDevice(NamedTuple):
    """The first of several ranks, its fake GPU, and what is measured there."""

    ranks: Ranks
    memory: Memory
    waits: Waits

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Within the block, every tensor is a fake one, and is counted."""
        with FakeTensorMode(allow_non_fake_inputs=True), self.memory, self.waits:
            yield


@contextlib.contextmanager
def fake_device(*, num_ranks: int, context_ranks: int) -> Iterator[FakeDevice]:
    """Be rank 0 of `num_ranks`, each on a fake GPU, within the block; the other ranks do not exist."""
    memory, waits = Memory(), Waits()
    _order_nothing(waits)
    storage: Any = torch.UntypedStorage
    storage.resize_ = lambda self, num_bytes: memory.resize(self, num_bytes)  # a bound method would lose `self`
    ShardingPropagator._fake_mode_lock = _Paused(memory)  # type: ignore[assignment]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        mesh = init_device_mesh("cuda", (num_ranks,))
        context = context_of(num_ranks, context_ranks)
        ranks = Ranks(rank=0, num_ranks=num_ranks, device=DEVICE, mesh=mesh, context=context)
        yield FakeDevice(ranks, memory, waits)
    finally:
        dist.destroy_process_group()
        storage.resize_ = _RESIZE


def _order_nothing(waits: Waits) -> None:
    """Replace the functions of `torch.cuda` that the learner and FSDP call."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_device, cuda.device_count = lambda: 0, lambda: 1
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.synchronize = lambda *_: waits.count("synchronize")
    cuda.get_device_name = lambda *_: "NVIDIA H100"
    cuda.get_device_capability = lambda *_: (9, 0)
    tensor: Any = Tensor
    tensor.record_stream = lambda *_: None
    tensor.pin_memory = lambda pageable: pageable
    functional: Any = F
    # In a mode it would not be replaced where layers are recomputed: that is another thread.
    functional.scaled_dot_product_attention = _efficient_attention


def _efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that the learner allows on a GPU. PyTorch asks the GPU for its kernels, and without one computes all
    scores of a head as a matrix, or refuses. Before the kernel it makes a mask of booleans one of the queries' dtype,
    and copies that to rows that are a multiple of MASK_ALIGNMENT.
    """
    if enable_gqa:
        raise RuntimeError("the memory-efficient kernel takes as many heads of keys as of queries")
    bias = None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        num_keys = key.shape[2]
        bias = F.pad(bias, (0, -num_keys % MASK_ALIGNMENT))[..., :num_keys]
        bias = bias.expand(*query.shape[:3], num_keys)
    trains = any(each.requires_grad for each in (query, key, value))
    attend = ATEN._scaled_dot_product_efficient_attention
    attended: Tensor = attend(query, key, value, bias, trains, 0.0, is_causal, scale=scale)[0]
    return attended
