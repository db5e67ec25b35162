"""A rank's part of the slots, and the pages of it that CUDA pins."""

import mmap
from types import SimpleNamespace

import pytest
import torch

from slipstream.common.transfer.host_memory import AnonymousMemory, spans_of
from slipstream.common.transfer.weights import buffer_bytes, layout
from slipstream.learner.publisher.slots import Slots
from tests.actors.cuda_runtime import Runtime, stand_in

PAGE = mmap.PAGESIZE
ROWS = layout([("wide", "bfloat16", (8, 3 * PAGE)), ("tiny", "float32", (3,)), ("none", "float32", (0, 4))])
DEADLINE_S = 60.0


def test_the_pages_of_a_rank_contain_its_rows_and_are_pinned_once() -> None:
    memory = AnonymousMemory("slot", buffer_bytes(ROWS))
    mapped = memory.mapped()
    start = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    slots = Slots([mapped], ROWS, own={"wide": slice(2, 4), "tiny": slice(2, 3), "none": slice(0, 0)})
    spans = spans_of((place.data_ptr(), place.nbytes) for place in slots._places[0].values())
    row = 2 * 3 * PAGE
    assert spans == [(start + 2 * row, 2 * row), (start + 8 * row, PAGE)]


def test_slots_are_pinned_after_the_first_version_from_a_gpu_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors only say that they are on a GPU; the copies run on the CPU."""
    runtime, synchronized = Runtime(), list[int]()
    stand_in(monkeypatch, runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stream = SimpleNamespace(synchronize=lambda: synchronized.append(len(runtime.pinned)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    entries = layout([("a", "float32", (2, PAGE)), ("b", "float32", (5,))])
    memories = [AnonymousMemory(f"slot-{number}", buffer_bytes(entries)) for number in range(3)]
    slots = Slots([each.mapped() for each in memories], entries, own={"a": slice(1, 2), "b": None})
    version = [("a", torch.ones(1, PAGE)), ("b", torch.arange(5.0))]
    slots.write(0, version)
    assert slots.pinned is None and synchronized == [], "host memory needs neither"

    on_gpu = [(name, tensor.as_subclass(OnGpu)) for name, tensor in version]
    assert slots.write(1, on_gpu) == 4 * PAGE + 20
    assert synchronized == [0] and slots.pinned is not None and slots.pinned.settled.wait(DEADLINE_S)
    pinned, rows = dict(runtime.pinned), 4 * PAGE
    assert len(pinned) == 3 and slots.pinned.num_bytes == sum(pinned.values()) == 3 * (rows + PAGE)
    slots.write(2, on_gpu)
    assert synchronized == [0, 3] and runtime.pinned == pinned
    slots.close()
    assert runtime.pinned == {}


class OnGpu(torch.Tensor):
    is_cuda = True


def test_versions_of_a_device_arrive_bit_by_bit_in_slots_that_cuda_pins(device: torch.device) -> None:
    entries = layout([("wide", "bfloat16", (1000, PAGE)), ("short", "float32", (5,))])
    memories = [AnonymousMemory(f"slot-{number}", buffer_bytes(entries)).mapped() for number in range(2)]
    slots = Slots(memories, entries, own={"wide": None, "short": None})
    for slot in (0, 1, 0):
        version = {"wide": torch.randn(1000, PAGE, device=device).bfloat16(), "short": torch.randn(5, device=device)}
        slots.write(slot, version.items())
        for name, place in slots._places[slot].items():
            assert torch.equal(place, version[name].cpu())
        if device.type == "cuda":
            assert slots.pinned is not None and slots.pinned.settled.wait(DEADLINE_S)
            assert slots.pinned.num_bytes == sum(num_bytes for _, num_bytes in slots.pinned.spans)
    slots.close()
    assert float(torch.ones(1000, device=device).sum()) == 1000  # where an error that CUDA kept would surface
