"""The chunks of a broadcast: two in flight, straight into their place or by way of a device, until a deadline."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore, ProcessGroup, ProcessGroupGloo

from slipstream.actors.engine.vllm_environment import vllm_environment
from slipstream.actors.weights.broadcast_receiver import Place, Receiving
from slipstream.common.transfer.weights import Hashing, WeightsError, layout, sealed, verify
from slipstream.learner.publisher.broadcast_sender import Sending

CPU = torch.device("cpu")
CHUNK_BYTES = 1000
PATIENCE_S = 60.0


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


def send(group: ProcessGroup, buffer: torch.Tensor) -> None:
    Sending(group, CPU, deadline=time.monotonic() + PATIENCE_S, stall_s=PATIENCE_S).send(buffer, CHUNK_BYTES)


def receive(
    group: ProcessGroup,
    buffer: torch.Tensor,
    *,
    lands_on_device: bool,
    for_s: float = PATIENCE_S,
    stall_s: float = PATIENCE_S,
    arrived: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    receiving = Receiving(group, CPU, deadline=time.monotonic() + for_s, stall_s=stall_s)
    receiving.receive(Place(buffer=buffer, arrived=arrived), CHUNK_BYTES, lands_on_device=lands_on_device)


@pytest.mark.parametrize("lands_on_device", [False, True])
@pytest.mark.parametrize("num_bytes", [1, 999, 1000, 1001, 2000, 12345])
def test_what_the_publisher_sends_is_what_a_member_receives(num_bytes: int, lands_on_device: bool) -> None:
    sent, received, ends = some_bytes(num_bytes), torch.zeros(num_bytes, dtype=torch.uint8), list[int]()
    with sending(lambda group: send(group, sent), 1) as (group,):
        receive(group, received, lands_on_device=lands_on_device, arrived=ends.append)
    assert torch.equal(received, sent)
    assert ends == [min(end, num_bytes) for end in range(CHUNK_BYTES, num_bytes + CHUNK_BYTES, CHUNK_BYTES)]


def test_members_with_and_without_a_device_take_part_in_one_broadcast() -> None:
    sent = some_bytes(5432)
    landed, direct = torch.zeros_like(sent), torch.zeros_like(sent)
    with sending(lambda group: send(group, sent), 2) as (one, other):
        thread = threading.Thread(target=receive, args=(other, direct), kwargs={"lands_on_device": False}, daemon=True)
        thread.start()
        receive(one, landed, lands_on_device=True)
        thread.join(PATIENCE_S)
    assert torch.equal(landed, sent) and torch.equal(direct, sent)


@pytest.mark.parametrize("lands_on_device", [False, True])
def test_a_sender_that_ends_half_way_raises_and_the_rest_of_the_buffer_stays(lands_on_device: bool) -> None:
    sent, received = some_bytes(5 * CHUNK_BYTES), torch.zeros(5 * CHUNK_BYTES, dtype=torch.uint8)

    def send_some(group: ProcessGroup) -> None:
        send(group, sent[: 2 * CHUNK_BYTES])
        group.abort()

    started, ends = time.monotonic(), list[int]()
    with sending(send_some, 1) as (group,), pytest.raises(RuntimeError):
        receive(group, received, lands_on_device=lands_on_device, for_s=3.0, arrived=ends.append)
    assert time.monotonic() - started < PATIENCE_S / 2, "it waited for the group's own time limit"
    assert all(torch.equal(received[:end], sent[:end]) for end in ends)
    assert not received[2 * CHUNK_BYTES :].any()


@pytest.mark.parametrize(("for_s", "stall_s"), [(0.3, PATIENCE_S), (PATIENCE_S, 0.3)])
def test_a_sender_that_stands_still_is_awaited_until_a_deadline_or_a_chunk(for_s: float, stall_s: float) -> None:
    received, is_over, started = torch.zeros(CHUNK_BYTES, dtype=torch.uint8), threading.Event(), time.monotonic()
    with sending(lambda group: is_over.wait(PATIENCE_S) or None, 1) as (group,):
        with pytest.raises(RuntimeError):
            receive(group, received, lands_on_device=False, for_s=for_s, stall_s=stall_s)
        assert time.monotonic() - started < PATIENCE_S / 2, "it waited for the group's own time limit"
        is_over.set()


def test_a_slow_broadcast_that_makes_progress_is_not_given_up() -> None:
    sent, received = some_bytes(4 * CHUNK_BYTES), torch.zeros(4 * CHUNK_BYTES, dtype=torch.uint8)
    arrived = list[int]()

    def send_slowly(group: ProcessGroup) -> None:
        for number, piece in enumerate(torch.split(sent, CHUNK_BYTES)):
            while len(arrived) < number:
                time.sleep(0.01)
            time.sleep(0.5)
            send(group, piece)

    with sending(send_slowly, 1) as (group,):
        receive(group, received, lands_on_device=False, stall_s=1.9, arrived=arrived.append)
    assert torch.equal(received, sent)


def test_tensors_are_hashed_as_soon_as_they_have_arrived_and_wrong_ones_are_refused() -> None:
    entries = layout((f"w{number}", "float32", (500,)) for number in range(8))
    sent = some_bytes(8 * 2048)
    manifest = sealed(entries, sent.numpy().data, policy_version=1, learner_epoch=1)
    received, other = torch.zeros_like(sent), sent.clone()
    other[3 * 2048 + 7] ^= 1
    with closing(Hashing(manifest.tensors, received.numpy().data)) as hashing:
        with sending(lambda group: send(group, sent), 1) as (group,):
            receive(group, received, lands_on_device=False, arrived=hashing.arrived)
        verify(manifest, received.numpy().data, hashing)
    with closing(Hashing(manifest.tensors, received.numpy().data)) as hashing:
        with sending(lambda group: send(group, other), 1) as (group,):
            receive(group, received, lands_on_device=False, arrived=hashing.arrived)
        with pytest.raises(WeightsError, match="w3 does not match its hash"):
            verify(manifest, received.numpy().data, hashing)


def test_a_tensor_is_not_hashed_before_its_last_byte_has_arrived() -> None:
    entries, buffer = layout([("a", "float32", (10,)), ("b", "float32", (10,))]), bytearray(128)
    with closing(Hashing(entries, memoryview(buffer))) as hashing:
        hashing.arrived(39)
        buffer[:40] = bytes(range(40))
        hashing.arrived(40)
        hashing.arrived(103)
        buffer[64:104] = bytes(range(40))
        early = hashing.digests()
    with closing(Hashing(entries, memoryview(buffer))) as hashing:
        assert early == hashing.digests() and early[0] == early[1]


def test_the_engine_process_is_told_that_a_broken_group_ends_itself_alone() -> None:
    assert vllm_environment()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
