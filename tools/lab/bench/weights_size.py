"""`make bench-weights-size SIZES="1 3"`: publish and refresh of large weights on the host, stage by stage.

Each size, in GB, has whole weights and deltas, one receiver and a broadcast over gloo. It needs seven times the size in
memory. The stages are compared with a memcpy of the weights, or with one gloo broadcast of as many bytes.
"""

import logging
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Queue
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from slipstream.actors.weights.receive import Receiver
from slipstream.common.process.log import log_to_stderr
from slipstream.replay.server.server import start_server
from slipstream.tools.lab.bench import benchmark
from slipstream.tools.lab.bench.benchmark import Row
from slipstream.tools.lab.bench.weights_stage import (
    POLL_S,
    SPAWN,
    TIMEOUT_S,
    Bench,
    Tensors,
    is_announced,
    is_broadcast,
    wait,
)

SHAPE = (4096, 4096)  # bfloat16: 32 MiB, as a projection of a 7B
NUM_VERSIONS = 5  # measured; one more comes before, which builds the group
CHANGED_EVERY = 100  # a step of RL changes about one in a hundred bfloat16 weights


@dataclass(kw_only=True, slots=True)
class Times:
    """Seconds of each measured version."""

    blocked_s: list[float] = field(default_factory=list)
    announced_s: list[float] = field(default_factory=list)  # after the learner's copy
    sent_s: list[float] = field(default_factory=list)
    verified_s: list[float] = field(default_factory=list)  # at the receiver, from before the learner's copy
    memcpy_s: list[float] = field(default_factory=list)
    gloo_s: list[float] = field(default_factory=list)


def main(sizes: list[str]) -> int:
    """Measure, print, and write docs/benchmarks/weights-size.json; return 0, because no row has a goal."""
    log_to_stderr(logging.WARNING)
    torch.set_num_threads(1)
    measuring, rows = benchmark.Run("weights-size"), list[Row]()
    for size in map(float, sizes or ["1"]):
        with tempfile.TemporaryDirectory(prefix="bench-weights-") as root, start_server(Path(root) / "redis") as server:
            bench = Bench(redis_url=server.secret_url, root=Path(root))
            rows += measured(bench, f"whole, {size:g} GB", size, anchor_every=1)
            rows += measured(bench, f"delta, {size:g} GB", size, anchor_every=NUM_VERSIONS + 2)
    return measuring.end(rows, gpu="", versions={"torch": str(torch.__version__)})


def measured(bench: Bench, run: str, size: float, *, anchor_every: int) -> list[Row]:
    num_tensors = max(1, round(size * 1e9 / (2 * SHAPE[0] * SHAPE[1])))
    tensors: Tensors = [
        (f"model.layers.{index}.weight", torch.randn(SHAPE).to(torch.bfloat16)) for index in range(num_tensors)
    ]
    num_bytes = sum(tensor.nbytes for _, tensor in tensors)
    arrivals: "Queue[tuple[int, float]]" = SPAWN.Queue()
    run_id, rendezvous = run.replace(" ", "-").replace(",", ""), str(bench.root / f"rendezvous-{anchor_every}")
    receiver = SPAWN.Process(target=_receive_all, args=(bench, run_id, rendezvous, num_bytes, arrivals), daemon=True)
    receiver.start()
    scratch, bulletin = torch.zeros(num_bytes, dtype=torch.uint8), bench.bulletin(run_id)
    times, sent_bytes = Times(), 0
    try:
        dist.init_process_group("gloo", store=FileStore(rendezvous, 2), rank=0, world_size=2)
        wait(lambda: bool(bulletin.broadcast_members()))
        with bench.publishing(run_id, tensors, anchor_every=anchor_every) as publisher:
            for version in range(NUM_VERSIONS + 1):
                begun = time.monotonic()
                publisher.publish(tensors, policy_version=version)
                copied = time.monotonic()
                wait(partial(is_announced, publisher, version))
                announced = time.monotonic()
                _, verified = arrivals.get(timeout=TIMEOUT_S)
                wait(partial(is_broadcast, publisher, version))
                if version:
                    times.blocked_s.append(copied - begun)
                    times.announced_s.append(announced - copied)
                    times.sent_s.append(publisher.stats.broadcast_s)
                    times.verified_s.append(verified - begun)
                    times.memcpy_s.append(_memcpy_s(tensors, scratch))
                    times.gloo_s.append(_gloo_s(scratch))
                    sent_bytes = publisher.stats.num_bytes
                for _, tensor in tensors:
                    tensor.view(-1)[::CHANGED_EVERY] *= 1.25
            assert publisher.stats.num_restarts == 0
    finally:
        receiver.kill()
        receiver.join()
        dist.destroy_process_group()
    print(
        f"{run}: {num_bytes} bytes of weights, {sent_bytes} sent; median gloo {statistics.median(times.gloo_s):.3f} s"
    )
    return [
        _row(f"{run}: the learner waits, against a memcpy", times.blocked_s, times.memcpy_s),
        _row(f"{run}: hashed and announced after that, against a memcpy", times.announced_s, times.memcpy_s),
        _row(f"{run}: sent, against one gloo broadcast of all weights", times.sent_s, times.gloo_s),
        _row(f"{run}: from publish to verified, against the same", times.verified_s, times.gloo_s),
    ]


def _row(name: str, values_s: list[float], against_s: list[float]) -> Row:
    return Row.of(name, values_s, unit="s", against=against_s)


def _memcpy_s(tensors: Tensors, scratch: torch.Tensor) -> float:
    started, offset = time.monotonic(), 0
    for _, tensor in tensors:
        scratch[offset : offset + tensor.nbytes].view(torch.bfloat16).view(tensor.shape).copy_(tensor)
        offset += tensor.nbytes
    return time.monotonic() - started


def _gloo_s(flat: torch.Tensor) -> float:
    dist.barrier()
    started = time.monotonic()
    dist.broadcast(flat, src=0)
    return time.monotonic() - started


def _receive_all(
    bench: Bench, run_id: str, rendezvous: str, num_bytes: int, arrivals: "Queue[tuple[int, float]]"
) -> None:
    """Receive each version as an actor does, then, after all but the first, as many bytes by gloo.

    Puts each version, and when it was verified, by the monotonic clock.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(rendezvous, 2), rank=1, world_size=2)
    receiver = Receiver(bench.receiver_info(run_id, "actor", "broadcast"))
    bulletin, scratch = bench.bulletin(run_id), torch.zeros(num_bytes, dtype=torch.uint8)
    for version in range(NUM_VERSIONS + 1):
        while (offer := bulletin.latest()) is None or offer.manifest.policy_version != version:
            time.sleep(POLL_S)
        receiver.receive(offer)
        arrivals.put((version, time.monotonic()))
        if version:
            dist.barrier()
            dist.broadcast(scratch, src=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
