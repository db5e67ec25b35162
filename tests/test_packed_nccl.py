"""What we rely on of vLLM's packed NCCL engine: its own code, over gloo and with streams that a CPU lacks left out."""

import dataclasses
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, ProcessGroup, ProcessGroupGloo
from vllm.config import ParallelConfig
from vllm.distributed.weight_transfer import nccl_engine, packed_tensor
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from actors.broadcast import TimedGroup, receive_chunks
from actors.packed_nccl import PackedNccl
from actors.vllm_environment import vllm_environment
from learner.publisher.broadcast import send_chunks

CPU = torch.device("cpu")
CHUNK_BYTES = 1000
PATIENCE_S = 60.0


class AWorker:
    """The part of a worker's configuration that a weight-transfer engine reads."""

    parallel_config = ParallelConfig()
    model_config = None


class AStream:
    def synchronize(self) -> None:
        """Nothing runs behind a CPU's back."""


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, num_buffers: (AStream(),) * num_buffers)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)


def some_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))


def gloo_group(store: HashStore, rank: int, size: int) -> ProcessGroup:
    group = ProcessGroup(store, rank, size)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=PATIENCE_S)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group._register_backend(CPU, ProcessGroup.BackendType.GLOO, ProcessGroupGloo(store, rank, size, options))
    return group


@contextmanager
def sending(send: Callable[[ProcessGroup], None], num_receivers: int) -> Iterator[list[ProcessGroup]]:
    """Rank 0 sends on a thread of its own; the groups of the other ranks, of which each must be driven by a thread."""
    store = HashStore()
    groups: dict[int, ProcessGroup] = {}

    def join(rank: int) -> None:
        groups[rank] = gloo_group(store, rank, num_receivers + 1)
        if rank == 0:
            send(groups[0])

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(num_receivers + 1)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join(PATIENCE_S)
    yield [groups[rank] for rank in range(1, num_receivers + 1)]
    threads[0].join(PATIENCE_S)
    assert not threads[0].is_alive()


def timed(group: ProcessGroup, *, for_s: float = PATIENCE_S) -> TimedGroup:
    return TimedGroup(group, time.monotonic() + for_s)


@pytest.mark.parametrize("num_bytes", [1, 999, 1000, 1001, 2000, 12345])
def test_what_the_publisher_sends_is_what_the_packed_engine_receives(no_streams: None, num_bytes: int) -> None:
    sent, received = some_bytes(num_bytes), torch.zeros(num_bytes, dtype=torch.uint8)
    deadline = time.monotonic() + PATIENCE_S
    with sending(lambda group: send_chunks(group, sent, CHUNK_BYTES, CPU, deadline), 1) as (group,):
        PackedNccl(AWorker(), CPU)(timed(group), received, CHUNK_BYTES)
    assert torch.equal(received, sent)


def test_members_over_nccl_and_gloo_see_the_same_chunks(no_streams: None) -> None:
    sent = some_bytes(5432)
    packed, plain = torch.zeros_like(sent), torch.zeros_like(sent)
    deadline = time.monotonic() + PATIENCE_S
    with sending(lambda group: send_chunks(group, sent, CHUNK_BYTES, CPU, deadline), 2) as (one, other):
        thread = threading.Thread(target=receive_chunks, args=(timed(other), plain, CHUNK_BYTES), daemon=True)
        thread.start()
        PackedNccl(AWorker(), CPU)(timed(one), packed, CHUNK_BYTES)
        thread.join(PATIENCE_S)
    assert torch.equal(packed, sent) and torch.equal(plain, sent)


def test_a_sender_that_ends_half_way_raises_and_touches_no_model(no_streams: None) -> None:
    sent, received = some_bytes(5 * CHUNK_BYTES), torch.zeros(5 * CHUNK_BYTES, dtype=torch.uint8)

    def send_some(group: ProcessGroup) -> None:
        send_chunks(group, sent[: 2 * CHUNK_BYTES], CHUNK_BYTES, CPU, time.monotonic() + PATIENCE_S)
        group.abort()

    started = time.monotonic()
    with sending(send_some, 1) as (group,), pytest.raises(RuntimeError):
        PackedNccl(AWorker(), CPU)(timed(group, for_s=3.0), received, CHUNK_BYTES)
    assert time.monotonic() - started < PATIENCE_S / 2, "it waited for the group's own time limit"
    assert torch.equal(received[: 2 * CHUNK_BYTES], sent[: 2 * CHUNK_BYTES]), "the chunks before the end came"
    assert not received[2 * CHUNK_BYTES :].any()


def test_a_sender_that_stands_still_is_waited_for_until_the_deadline(no_streams: None) -> None:
    received, is_over, started = torch.zeros(CHUNK_BYTES, dtype=torch.uint8), threading.Event(), time.monotonic()
    with sending(lambda group: is_over.wait(PATIENCE_S) or None, 1) as (group,):
        with pytest.raises(RuntimeError):
            PackedNccl(AWorker(), CPU)(timed(group, for_s=0.3), received, CHUNK_BYTES)
        assert time.monotonic() - started < PATIENCE_S / 2, "it waited for the group's own time limit"
        is_over.set()


@pytest.mark.filterwarnings("ignore:Tensor .* exceeds buffer_size_bytes")  # so that each chunk fills a buffer
def test_vllms_own_sender_cuts_the_same_chunks(no_streams: None) -> None:
    class Recording:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def broadcast(self, tensor: torch.Tensor, src: int) -> None:
            assert tensor.dtype is torch.uint8 and src == 0
            self.sizes.append(tensor.numel())

    sent, theirs, ours = some_bytes(5432), Recording(), Recording()
    chunks: Iterator[tuple[str, torch.Tensor]] = enumerate(torch.split(sent, CHUNK_BYTES))  # type: ignore[assignment]
    packed_tensor.packed_nccl_broadcast_producer(
        chunks, theirs, src=0, post_iter_func=lambda item: item[1], buffer_size_bytes=CHUNK_BYTES - 1
    )
    PackedNccl(AWorker(), CPU)(ours, sent.clone(), CHUNK_BYTES)  # type: ignore[arg-type]
    assert ours.sizes == theirs.sizes == [1000] * 5 + [432]


def test_the_interface_of_vllms_engine_is_the_one_that_is_used() -> None:
    fields = [field.name for field in dataclasses.fields(NCCLWeightTransferUpdateInfo)]
    assert fields == ["names", "dtype_names", "shapes"]
    parameters = inspect.signature(packed_tensor.packed_nccl_broadcast_consumer).parameters
    assert {"iterator", "group", "src", "post_unpack_func", "buffer_size_bytes", "device"} <= parameters.keys()
    engine: Any = NCCLWeightTransferEngine(None, AWorker(), CPU, None)
    assert engine.model_update_group is None and engine.packed is False
    assert engine.packed_buffer_size_bytes == packed_tensor.DEFAULT_PACKED_BUFFER_SIZE_BYTES
    with pytest.raises(RuntimeError, match="not initialized"):
        engine.receive_weights(NCCLWeightTransferUpdateInfo(names=[], dtype_names=[], shapes=[]))
    assert nccl_engine.packed_nccl_broadcast_consumer is packed_tensor.packed_nccl_broadcast_consumer


def test_the_engine_process_is_told_that_a_broken_group_ends_itself_alone() -> None:
    assert vllm_environment()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
