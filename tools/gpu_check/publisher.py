"""Publishing from the device: how long the learner waits for its copy, with pinned memory beside it."""

import mmap
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.weights import buffer_bytes, layout
from replay.server import start_server
from tools.bench.weights_stage import Bench, Tensors, dtype_of, is_announced, wait
from tools.gpu_check.findings import Findings

NUM_VERSIONS = 4
SHAPE, NUM_TENSORS = (8960, 1536), 112  # 3.1 GB in bfloat16, as many as a model of 1.5 billion weights has
REDUCED_SHAPE, NUM_REDUCED = (512, 256), 8
CHANGED_EVERY = 100  # a step of RL changes about one in a hundred bfloat16 weights


def check(findings: Findings, device: str) -> None:
    """The learner's own publisher with a Redis of its own, then plain copies into pageable and pinned memory."""
    shape, number = (REDUCED_SHAPE, NUM_REDUCED) if device == "cpu" else (SHAPE, NUM_TENSORS)
    tensors = [(f"w{index}", torch.randn(shape, device=device).bfloat16()) for index in range(number)]
    num_bytes = sum(tensor.nbytes for _, tensor in tensors)
    findings.note("bytes of a version", num_bytes / 1e9, "GB")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as root, start_server(Path(root) / "redis") as server:
        _publish(findings, Bench(redis_url=server.secret_url, root=Path(root)), tensors, num_bytes)
    _copies(findings, tensors, pinned=device == "cuda")


def _publish(findings: Findings, bench: Bench, tensors: Tensors, num_bytes: int) -> None:
    with bench.publishing("gpu-check", tensors, anchor_every=10) as publisher:
        for version in range(NUM_VERSIONS):
            started = time.perf_counter()
            publisher.publish(tensors, policy_version=version)
            blocked_s = time.perf_counter() - started
            wait(partial(is_announced, publisher, version))
            announced_s = time.perf_counter() - started
            what = f"version {version}{' (whole)' if version == 0 else ' (delta)'}"
            findings.note(f"{what}: the learner waits", blocked_s, "s")
            findings.note(f"{what}: copied at", num_bytes / 1e9 / publisher.stats.copy_s, "GB/s")
            findings.note(f"{what}: announced after", announced_s, "s")
            findings.note(f"{what}: bytes for an actor of the version before", publisher.stats.num_bytes / 1e9, "GB")
            for _, tensor in tensors:
                tensor.view(-1)[::CHANGED_EVERY] *= 1.25
        findings.require("every version was announced", publisher.stats.num_published == NUM_VERSIONS)
        findings.require("the publisher process lived", publisher.stats.num_restarts == 0)


def _copies(findings: Findings, tensors: Tensors, *, pinned: bool) -> None:
    """The same bytes into one anonymous mapping, as the publisher's slots are; then after CUDA has pinned it."""
    entries = layout((name, dtype_of(tensor), tuple(tensor.shape)) for name, tensor in tensors)
    slot = mmap.mmap(-1, buffer_bytes(entries), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    flat = torch.frombuffer(slot, dtype=torch.uint8)
    places = [
        flat[entry.offset : entry.offset + entry.num_bytes].view(torch.bfloat16).view(entry.shape) for entry in entries
    ]
    findings.note("plain copy into pageable memory", _rate(places, tensors), "GB/s")
    if pinned:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        started = time.perf_counter()
        failed = int(runtime.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))
        findings.note("time to pin it", time.perf_counter() - started, "s")
        findings.require("CUDA pins a mapping", failed == 0, f"cudaHostRegister returned {failed}")
        findings.note("plain copy into pinned memory", _rate(places, tensors), "GB/s")
        runtime.cudaHostUnregister(flat.data_ptr())
    same = all(torch.equal(place, tensor.cpu()) for place, (_, tensor) in zip(places, tensors, strict=True))
    findings.require("the copy is exact", same)


def _rate(places: list[Tensor], tensors: Tensors) -> float:
    rates = []
    for _ in range(3):
        started = time.perf_counter()
        for place, (_, tensor) in zip(places, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rates.append(sum(place.nbytes for place in places) / 1e9 / (time.perf_counter() - started))
    return max(rates)
