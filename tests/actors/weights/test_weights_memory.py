"""Received weights in memory that other processes map: the same bytes, one copy, pinned for a GPU, nothing left."""

import mmap
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from slipstream.actors.weights.receive import Receiver
from slipstream.actors.weights.weights_memory import MappedWeights, WeightsMemory
from slipstream.tools.lab.bench.weights_stage import publish_whole
from tests.actors.cuda_runtime import Runtime, stand_in
from tests.learner.publisher.test_weight_deltas import nudged
from tests.learner.publisher.test_weights import Plane, flat_bytes, weights

GPU = torch.device("cuda", 1)
PAGE = mmap.PAGESIZE
DEADLINE_S = 60.0
READER = """
import sys
from slipstream.actors.weights.weights_memory import MappedWeights
view = MappedWeights().at(sys.argv[1])
print(bytes(view.numpy()).hex())
view += 1
"""


def shared(num_bytes: int, device: torch.device | None = None) -> WeightsMemory:
    memory = WeightsMemory(shared=True, device=device)
    memory.resize(num_bytes)
    return memory


def used(memory: WeightsMemory | MappedWeights, times: int = 1) -> None:
    for _ in range(times):
        memory.pinning.used(memory.flat)


def pinned(memory: WeightsMemory | MappedWeights, runtime: Runtime) -> bool:
    """Whether what `runtime` has pinned last is all of the memory, once its thread is through."""
    if memory.pinning.pages is None:
        return False
    assert memory.pinning.pages.settled.wait(DEADLINE_S)
    start, num_bytes = list(runtime.pinned.items())[-1]
    first = memory.flat.data_ptr()
    return start <= first and first + memory.flat.numel() <= start + num_bytes


def test_another_process_maps_the_bytes_and_cannot_change_them() -> None:
    memory = shared(5)
    memory.flat.copy_(MappedWeights().at(memory.path) + 7)
    command = [sys.executable, "-c", READER, memory.path]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0707070707\n"
    assert memory.flat.tolist() == [7] * 5


def test_memory_that_no_process_needs_is_freed_and_a_view_outlives_its_owner() -> None:
    memory = shared(3)
    view, path = MappedWeights().at(memory.path), Path(memory.path)
    memory.flat.fill_(9)
    del memory
    assert not path.exists()
    assert view.tolist() == [9] * 3
    assert MappedWeights().at(shared(0).path).tolist() == []


def test_memory_is_pinned_at_its_second_use_and_unpinned_before_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    devices = stand_in(monkeypatch, runtime)
    memory = WeightsMemory(device=GPU)
    memory.resize(3 * PAGE)
    used(memory)
    assert not pinned(memory, runtime), "a buffer that only one version uses is not worth it"
    memory.resize(3 * PAGE)
    used(memory, times=2)
    assert pinned(memory, runtime) and devices == [1] and len(runtime.pinned) == 1
    memory.adopt(torch.ones(PAGE, dtype=torch.uint8))
    assert runtime.pinned == {} and memory.flat.tolist() == [1] * PAGE
    used(memory, times=2)
    assert pinned(memory, runtime)
    memory.resize(0)
    used(memory, times=2)
    assert runtime.pinned == {}


def test_each_worker_pins_its_mapping_until_the_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    stand_in(monkeypatch, runtime)
    owner, mapped = shared(2 * PAGE, GPU), MappedWeights(GPU)
    for version in (1, 2):
        owner.flat.fill_(version)
        view = mapped.at(owner.path)
        assert view.tolist() == [version] * 2 * PAGE
        used(mapped)
    address = view.data_ptr()
    assert pinned(mapped, runtime) and mapped.at(owner.path).data_ptr() == address != owner.flat.data_ptr()

    del view
    owner.resize(PAGE)
    owner.flat.fill_(3)
    assert mapped.at(owner.path).tolist() == [3] * PAGE and runtime.pinned == {}
    used(mapped, times=2)
    assert pinned(mapped, runtime)
    mapped.pinning.end()
    mapped.pinning.end()
    assert runtime.pinned == {}


def test_without_a_gpu_nothing_is_pinned() -> None:
    owner, mapped = shared(PAGE), MappedWeights()
    for memory in (owner, mapped):
        mapped.at(owner.path)
        used(memory, times=2)
        assert memory.pinning.pages is None


@pytest.mark.parametrize("anchor_every", [1, 10])
def test_what_a_receiver_pulls_whole_or_as_deltas_is_what_others_map(anchor_every: int, plane: Plane) -> None:
    tensors, receiver = weights(1), Receiver(plane.info("a", "pull"), shared=True)
    with plane.publishing(anchor_every=anchor_every) as publisher, closing(receiver):
        for version in (1, 2, 3):
            publish_whole(publisher, tensors, policy_version=version)
            plane.wait_for(version)
            offer = plane.offer()
            assert bytes(receiver.receive(offer).numpy()) == flat_bytes(tensors)
            assert bytes(MappedWeights().at(receiver.memory.path).numpy()) == flat_bytes(tensors)
            tensors = nudged(tensors, seed=version)
        assert bool(offer.manifest.deltas) == (anchor_every > 1)
