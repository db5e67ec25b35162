"""Publishing from the device: how long the learner waits for its copy, before its memory is pinned and after."""

import mmap
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from slipstream.common.transfer.anonymous_memory import map_memory
from slipstream.learner.publisher.publish import Publisher
from slipstream.replay.server.server import start_server
from slipstream.tools.lab.bench.weights_stage import Bench, Tensors, is_announced, wait
from slipstream.tools.lab.gpu_check.findings import Findings

NUM_VERSIONS = 5
SHAPE, NUM_TENSORS = (8960, 1536), 112  # 3.1 GB in bfloat16, as many as a model of 1.5 billion weights has
REDUCED_SHAPE, NUM_REDUCED = (512, 256), 8
CHANGED_EVERY = 100  # a step of RL changes about one in a hundred bfloat16 weights
PINNED_WITHIN_S = 60.0


def check(findings: Findings, device: str) -> None:
    """The learner's own publisher with a Redis of its own; on a GPU, its slots are pinned after the first version."""
    shape, number = (REDUCED_SHAPE, NUM_REDUCED) if device == "cpu" else (SHAPE, NUM_TENSORS)
    tensors = [(f"w{index}", torch.randn(shape, device=device).bfloat16()) for index in range(number)]
    findings.note("bytes of a version", sum(tensor.nbytes for _, tensor in tensors) / 1e9, "GB")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as root, start_server(Path(root) / "redis") as server:
        bench = Bench(redis_url=server.secret_url, root=Path(root))
        with bench.publishing("gpu-check", tensors, anchor_every=10) as publisher:
            _publish(findings, publisher, tensors, 0, "whole, not pinned")
            if device == "cuda":
                _wait_for_pins(findings, publisher)
            for version in range(1, NUM_VERSIONS):
                for _, tensor in tensors:
                    tensor.view(-1)[::CHANGED_EVERY] *= 1.25
                _publish(findings, publisher, tensors, version, "delta, pinned" if device == "cuda" else "delta")
            findings.require("every version was announced", publisher.stats.num_published == NUM_VERSIONS)
            findings.require("the publisher process lived", publisher.stats.num_restarts == 0)
    if device == "cuda":  # an error that CUDA kept of a call above would surface here
        findings.require("a kernel after that is right", float(torch.ones(1000, device=device).sum()) == 1000)


def _publish(findings: Findings, publisher: Publisher, tensors: Tensors, version: int, how: str) -> None:
    num_bytes, slot, started = sum(tensor.nbytes for _, tensor in tensors), publisher.free_slot(), time.perf_counter()
    publisher.publish(tensors, policy_version=version)
    blocked_s = time.perf_counter() - started
    written = map_memory(publisher.slot_paths[slot], access=mmap.ACCESS_COPY)
    flat, offset, exact = torch.frombuffer(written, dtype=torch.bfloat16), 0, True
    for _, tensor in tensors:  # their sizes are multiples of the alignment, so they lie end to end
        exact = exact and torch.equal(flat[offset : offset + tensor.numel()].view(tensor.shape), tensor.cpu())
        offset += tensor.numel()
    wait(partial(is_announced, publisher, version))
    what = f"version {version} ({how})"
    findings.note(f"{what}: the learner waits", blocked_s, "s")
    findings.note(f"{what}: copied at", num_bytes / 1e9 / publisher.stats.copy_s, "GB/s")
    findings.note(f"{what}: announced after", time.perf_counter() - started, "s")
    findings.note(f"{what}: bytes for an actor of the version before", publisher.stats.num_bytes / 1e9, "GB")
    findings.require(f"{what}: the copy is exact", exact)


def _wait_for_pins(findings: Findings, publisher: Publisher) -> None:
    started, pages = time.perf_counter(), publisher.slots.pinned
    assert pages is not None
    pages.settled.wait(PINNED_WITHIN_S)
    findings.note("pinning took, beside the above", time.perf_counter() - started, "s")
    findings.note("pinned", pages.num_bytes / 1e9, "GB")
    num_bytes = sum(num for _, num in pages.spans)
    findings.require("CUDA pinned all slots", pages.num_bytes == num_bytes, f"{pages.num_bytes} of {num_bytes} bytes")
