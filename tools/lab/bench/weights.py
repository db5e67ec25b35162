"""`make bench-weights`: measure the cost of publishing for the learner and of moving weights, against their limits.

Its parts: a publish against a copy of the weights; a broadcast against gloo
alone; the bytes that the publisher serves with a relay; deltas of a real fine-tuning against whole weights; and the
pause of a commit against the time of a token. docs/benchmarks.md has the method.
"""

import logging
import os
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from multiprocessing import Queue
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from slipstream.actors.engine.vllm_environment import vllm_environment
from slipstream.actors.host.relay import Relay, RelayInfo
from slipstream.actors.weights.receive import Receiver
from slipstream.common.process.log import log_to_stderr
from slipstream.common.transfer.chunk_server import ServerLimits
from slipstream.common.transfer.weights import buffer_bytes, layout
from slipstream.tools.lab.bench import benchmark
from slipstream.tools.lab.bench.benchmark import Row
from slipstream.tools.lab.bench.deltas import Trace
from slipstream.tools.lab.bench.refresh import refresh
from slipstream.tools.lab.bench.weights_stage import (
    NUM_RECEIVERS,
    REPEATS,
    SPAWN,
    TIMEOUT_S,
    WEIGHTS,
    Bench,
    Tensors,
    dtype_of,
    is_announced,
    is_broadcast,
    large_tensors,
    offered,
    publish_whole,
    wait,
)
from slipstream.tools.lab.loopback_server import start_server

NUM_RELAYED, NUM_RELAYED_TENSORS, NUM_RELAYED_VERSIONS = 8, 4, 4
NUM_VERSIONS = 100


def main() -> int:
    """Measure, print, and write docs/benchmarks/weights.json; return 0 if every goal holds, else 1."""
    log_to_stderr(logging.WARNING)
    torch.set_num_threads(1)
    measuring = benchmark.Run("weights")
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as root, start_server(Path(root) / "redis") as server:
        bench = Bench(redis_url=server.secret_url, root=Path(root))
        rows = [publish(bench), broadcast(bench), relayed(bench), *deltas(bench), refresh()]
    return measuring.end(
        rows,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        versions={"torch": str(torch.__version__)},
    )


def publish(bench: Bench) -> Row:
    """How long a learner waits in `publish`, against a copy of the same tensors into allocated memory."""
    tensors = large_tensors()
    copies = [torch.zeros_like(tensor) for _, tensor in tensors]
    blocked_s, copied_s = [], []
    with bench.publishing("publish", tensors, anchor_every=1) as publisher:
        for version in range(REPEATS + 1):
            started = time.perf_counter()
            publish_whole(publisher, tensors, policy_version=version)
            blocked_s.append(time.perf_counter() - started)
            wait(partial(is_announced, publisher, version))
            started = time.perf_counter()
            for copy, (_, tensor) in zip(copies, tensors, strict=True):
                copy.copy_(tensor)
            copied_s.append(time.perf_counter() - started)
    return Row.of(
        "publish, against a memcpy of the weights",
        [1e3 * seconds for seconds in blocked_s[1:]],  # the first waits for the process to start
        unit="ms",
        against=[1e3 * seconds for seconds in copied_s[1:]],
        goal="ratio <= 1.2",
    )


def broadcast(bench: Bench) -> Row:
    """A broadcast of whole weights, against one gloo broadcast of as many bytes to the same processes."""
    tensors, bulletin = large_tensors(), bench.bulletin("broadcast")
    num_bytes = sum(tensor.nbytes for _, tensor in tensors)
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    rendezvous = str(bench.root / "rendezvous")
    store = FileStore(rendezvous, NUM_RECEIVERS + 1)
    receivers = [
        SPAWN.Process(target=_receive_by_turns, args=(bench, rank, rendezvous, num_bytes), daemon=True)
        for rank in range(1, NUM_RECEIVERS + 1)
    ]
    ours_s, gloo_s = [], []
    try:
        for receiver in receivers:
            receiver.start()
        dist.init_process_group("gloo", store=store, rank=0, world_size=NUM_RECEIVERS + 1)
        wait(lambda: len(bulletin.broadcast_members()) == NUM_RECEIVERS)
        with bench.publishing("broadcast", tensors, anchor_every=1) as publisher:
            for version in range(REPEATS + 1):
                publish_whole(publisher, tensors, policy_version=version)
                wait(partial(is_broadcast, publisher, version))
                ours_s.append(publisher.stats.broadcast_s)
                dist.barrier()
                started = time.perf_counter()
                dist.broadcast(flat, src=0)
                gloo_s.append(time.perf_counter() - started)
    finally:
        for receiver in receivers:
            receiver.kill()
            receiver.join()
        dist.destroy_process_group()
    return Row.of(
        f"broadcast: whole weights to {NUM_RECEIVERS} receivers, against gloo alone",
        [num_bytes / 1e6 / seconds for seconds in ours_s[1:]],  # the first builds the group
        unit="MB/s",
        against=[num_bytes / 1e6 / seconds for seconds in gloo_s[1:]],
        goal="ratio >= 0.7",
    )


def _receive_by_turns(bench: Bench, rank: int, rendezvous: str, num_bytes: int) -> None:
    """Receive each version as an actor does, then as many bytes by gloo. Runs in its own process until it is killed."""
    torch.set_num_threads(1)
    store = FileStore(rendezvous, NUM_RECEIVERS + 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RECEIVERS + 1)
    receiver = Receiver(bench.receiver_info("broadcast", f"actor{rank}", "broadcast"))
    bulletin, flat = bench.bulletin("broadcast"), torch.zeros(num_bytes, dtype=torch.uint8)
    for version in range(REPEATS + 1):
        receiver.receive(offered(bulletin, version))
        dist.barrier()
        dist.broadcast(flat, src=0)


def relayed(bench: Bench) -> Row:
    """The bytes of each version that the publisher serves when many receivers pull through a relay."""
    tensors, bulletin = large_tensors()[:NUM_RELAYED_TENSORS], bench.bulletin("relayed")
    num_bytes = sum(tensor.nbytes for _, tensor in tensors)
    arrived: Queue[int] = SPAWN.Queue()
    processes = [SPAWN.Process(target=_relay, args=(bench,), daemon=True)] + [
        SPAWN.Process(target=_pull_all, args=(bench, f"actor{rank}", arrived), daemon=True)
        for rank in range(NUM_RELAYED)
    ]
    served = [0]
    try:
        for process in processes:
            process.start()
        wait(lambda: bool(bulletin.relays()))
        with bench.publishing("relayed", tensors, anchor_every=1) as publisher:
            for version in range(NUM_RELAYED_VERSIONS + 1):
                publish_whole(publisher, tensors, policy_version=version)
                wait(partial(is_announced, publisher, version))
                served.append(
                    publisher.stats.announced.served_bytes
                )  # of the versions before: it is updated with each announcement
                for _ in range(NUM_RELAYED):
                    arrived.get(timeout=TIMEOUT_S)
                for _, tensor in tensors:
                    tensor += 1  # a relay does not pull chunks again that it has
    finally:
        for process in processes:
            process.kill()
            process.join()
    return Row.of(
        f"relay: what the publisher serves for {NUM_RELAYED} receivers, against one copy",
        [float(after - before) for before, after in pairwise(served[1:])],
        unit="bytes",
        against=[float(num_bytes)] * NUM_RELAYED_VERSIONS,
        goal="ratio <= 1.01",
    )


def _relay(bench: Bench) -> None:
    limits = ServerLimits(fan_out=NUM_RELAYED)
    info = RelayInfo(
        redis_url=bench.redis_url,
        run_id="relayed",
        name="relay",
        host="a-host-of-its-own",
        address=WEIGHTS.host,
        limits=limits,
        timeout_s=TIMEOUT_S,
    )
    Relay(info, key=None)
    time.sleep(TIMEOUT_S)


def _pull_all(bench: Bench, actor: str, arrived: "Queue[int]") -> None:
    receiver, bulletin = Receiver(bench.receiver_info("relayed", actor, "pull")), bench.bulletin("relayed")
    for version in range(NUM_RELAYED_VERSIONS + 1):
        receiver.receive(offered(bulletin, version))
        arrived.put(version)


def deltas(bench: Bench) -> tuple[Row, Row]:
    """Publish and pull every step of a real fine-tuning: the bytes of a version, whole and as a delta."""
    trace = Trace()
    bulletin, receiver = bench.bulletin("deltas"), Receiver(bench.receiver_info("deltas", "actor", "pull"))
    whole_bytes, delta_bytes, num_exact = [], [], 0
    with bench.publishing("deltas", trace.published()) as publisher:
        for version in range(NUM_VERSIONS + 1):
            tensors = trace.published()
            publish_whole(publisher, tensors, policy_version=version)
            offer = offered(bulletin, version)
            received = receiver.receive(offer)
            if version:  # the first has no predecessor, so it is sent whole
                num_exact += _is_exact(received, tensors)
                whole_bytes.append(float(offer.manifest.num_bytes))
                delta_bytes.append(float(publisher.stats.announced.num_bytes))
            trace.step()
    receiver.close()
    return (
        Row.of(
            "deltas: bytes of a version whole, against its delta, lr 1e-6 in bfloat16",
            whole_bytes,
            unit="bytes",
            against=delta_bytes,
            goal="ratio >= 60",
        ),
        Row.of(
            "deltas: versions that arrived bit for bit, of those published",
            [num_exact],
            unit="versions",
            against=[NUM_VERSIONS],
            goal="ratio >= 1",
        ),
    )


def _is_exact(received: torch.Tensor, tensors: Tensors) -> bool:
    """Whether the flat buffer `received` equals `tensors`, byte by byte; the hashes that were sent are not used."""
    entries = layout((name, dtype_of(tensor), tuple(tensor.shape)) for name, tensor in tensors)
    sent = torch.zeros(buffer_bytes(entries), dtype=torch.uint8)
    for entry, (_, tensor) in zip(entries, tensors, strict=True):
        sent[entry.offset : entry.offset + entry.num_bytes] = tensor.contiguous().flatten().view(torch.uint8)
    return torch.equal(received, sent)


if __name__ == "__main__":
    os.environ.update(vllm_environment())
    sys.exit(main())
