"""Which pages are pinned, by whom, and what happens if CUDA refuses."""

import logging
import mmap

import pytest
import torch

from slipstream.common.transfer.host_memory import PinnedPages, spans_of
from tests.actors.cuda_runtime import Runtime, stand_in

PAGE = mmap.PAGESIZE
DEADLINE_S = 60.0


def test_places_on_one_page_or_on_neighbouring_pages_are_one_span() -> None:
    start = 7 * PAGE
    places = [(5 * PAGE + 1, 2), (0, PAGE - 7), (PAGE + 9, PAGE - 10), (30, 60), (6 * PAGE, 0)]
    extents = [(start + offset, num_bytes) for offset, num_bytes in places]
    assert spans_of(extents) == [(start, 2 * PAGE), (start + 5 * PAGE, PAGE)]


def test_every_page_is_pinned_by_one_thread_and_unpinned_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    devices = stand_in(monkeypatch, runtime)
    spans = [(PAGE, 2 * PAGE), (9 * PAGE, PAGE)]
    pages = PinnedPages(spans, device=3, cuda=torch.cuda)
    assert pages.settled.wait(DEADLINE_S)
    assert (list(runtime.pinned.items()), pages.num_bytes, devices) == (spans, 3 * PAGE, [3])
    pages.close()
    assert runtime.pinned == {} and runtime.threads == {"pin-pages"}


def test_memory_that_cuda_refuses_to_pin_is_logged_once_and_what_is_pinned_is_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(refused=1)
    stand_in(monkeypatch, runtime)
    with caplog.at_level(logging.WARNING):
        pages = PinnedPages([(number * 4 * PAGE, PAGE) for number in range(1, 6)], device=0, cuda=torch.cuda)
        assert pages.settled.wait(DEADLINE_S)
        pages.close()
    (record,) = caplog.records
    assert "cudaHostRegister returned 2 for 4096 bytes, after 4096 bytes" in record.getMessage()
    assert (pages.num_bytes, runtime.pinned) == (PAGE, {})
