"""A rank's part of the slots, and the pages of it that CUDA pins; a stand-in takes the calls of the CUDA runtime."""

import logging
import mmap
import threading
from types import SimpleNamespace

import pytest
import torch

from common.anonymous_memory import AnonymousMemory
from common.weights import buffer_bytes, layout
from learner.publisher.slots import PinnedPages, Slots, spans_of

PAGE = mmap.PAGESIZE
ROWS = layout([("wide", "bfloat16", (8, 3 * PAGE)), ("tiny", "float32", (3,)), ("none", "float32", (0, 4))])
DEADLINE_S = 60.0


class Runtime:
    """Takes what `torch.cuda.cudart()` takes, and refuses the pages from number `refused` on."""

    def __init__(self, refused: int = 1000) -> None:
        self.pinned: dict[int, int] = {}
        self.threads = set[str]()
        self._refused = refused

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert (address % PAGE, num_bytes % PAGE, flags) == (0, 0, 0) and num_bytes
        self.threads.add(threading.current_thread().name)
        if len(self.pinned) == self._refused:
            return 2
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.threads.add(threading.current_thread().name)
        del self.pinned[address]
        return 0


def stand_in(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> list[int]:
    """Let `runtime` be CUDA's; return the devices that are set."""
    devices = list[int]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return devices


def test_the_pages_of_a_rank_contain_its_rows_and_are_pinned_once() -> None:
    memory = AnonymousMemory("slot", buffer_bytes(ROWS))
    mapped = memory.mapped()
    start = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    slots = Slots([mapped], ROWS, own={"wide": slice(2, 4), "tiny": slice(2, 3), "none": slice(0, 0)})
    spans = spans_of(slots._places[0].values())
    row = 2 * 3 * PAGE
    assert spans == [(start + 2 * row, 2 * row), (start + 8 * row, PAGE)]


def test_places_on_one_page_or_on_neighbouring_pages_are_one_span() -> None:
    flat = torch.frombuffer(mmap.mmap(-1, 8 * PAGE), dtype=torch.uint8)
    start = flat.data_ptr()
    places = [flat[5 * PAGE + 1 : 5 * PAGE + 3], flat[: PAGE - 7], flat[PAGE + 9 : 2 * PAGE - 1], flat[30:90]]
    assert spans_of(places) == [(start, 2 * PAGE), (start + 5 * PAGE, PAGE)]


def test_every_page_is_pinned_by_one_thread_and_unpinned_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    devices = stand_in(monkeypatch, runtime)
    spans = [(PAGE, 2 * PAGE), (9 * PAGE, PAGE)]
    pages = PinnedPages(spans, device=3)
    assert pages.settled.wait(DEADLINE_S)
    assert (list(runtime.pinned.items()), pages.num_bytes, devices) == (spans, 3 * PAGE, [3])
    pages.close()
    assert runtime.pinned == {} and runtime.threads == {"pin-slots"}


def test_memory_that_cuda_refuses_to_pin_is_logged_once_and_what_is_pinned_is_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(refused=1)
    stand_in(monkeypatch, runtime)
    with caplog.at_level(logging.WARNING):
        pages = PinnedPages([(number * 4 * PAGE, PAGE) for number in range(1, 6)], device=0)
        assert pages.settled.wait(DEADLINE_S)
        pages.close()
    (record,) = caplog.records
    assert "cudaHostRegister returned 2 for 4096 bytes, after 4096 bytes" in record.getMessage()
    assert (pages.num_bytes, runtime.pinned) == (PAGE, {})


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
