"""Measures the peak memory of log-probabilities in chunks, against that of all logits at once."""

import itertools
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.learner.model.logprobs import chunked_logprobs
from slipstream.tools.lab.bench.benchmark import Row

NUM_TOKENS, WIDTH, VOCAB_SIZE, CHUNK_TOKENS = 2048, 128, 32_768, 128


def memory_row(device: torch.device) -> Row:
    """Peak memory of forward and backward of NUM_TOKENS log-probabilities over VOCAB_SIZE words."""
    chunked = _peak_bytes(device, CHUNK_TOKENS)
    whole = _peak_bytes(device, NUM_TOKENS)
    return Row.of(
        f"peak memory of {NUM_TOKENS:,} log-probabilities over {VOCAB_SIZE:,} words, {CHUNK_TOKENS} at a time, "
        "beside all at once",
        [chunked / 2**20],
        unit="MiB",
        against=[whole / 2**20],
        goal="ratio <= 0.25",
    )


def _peak_bytes(device: torch.device, chunk_tokens: int) -> int:
    hidden = torch.randn(NUM_TOKENS, WIDTH, device=device, requires_grad=True)
    weight = torch.randn(VOCAB_SIZE, WIDTH, device=device, requires_grad=True)
    targets = torch.zeros(NUM_TOKENS, dtype=torch.long, device=device)

    def work() -> None:
        found = chunked_logprobs(hidden, weight, None, targets, temperature=1.0, chunk_tokens=chunk_tokens)
        torch.autograd.backward(found.logprobs.sum())

    return _cuda_peak_bytes(work) if device.type == "cuda" else _host_peak_bytes(work)


def _cuda_peak_bytes(work: Callable[[], None]) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() - before


def _host_peak_bytes(work: Callable[[], None]) -> int:
    """The maximum of bytes that PyTorch's allocator had given out; unlike resident memory, it is deterministic."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(int(event.nbytes()) for event in events))
