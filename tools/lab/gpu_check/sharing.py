"""A learner and a stand-in of an actor on one device: pull, broadcast over gloo, and a peer that never answers.

The stand-in receives as an actor does, verifies, and copies the weights to the device. NCCL refuses two processes on
one GPU: so the broadcast must go over gloo although both sides could use NCCL.
"""

import tempfile
import time
from dataclasses import dataclass
from multiprocessing import Queue
from pathlib import Path

import torch
from torch import Tensor

from slipstream.actors.weights.broadcast import BroadcastMember, Gpu
from slipstream.actors.weights.receive import Receiver
from slipstream.common.process.connection import connect
from slipstream.learner.publisher.publish import Publisher
from slipstream.replay.server.server import start_server
from slipstream.tools.lab.bench.weights_stage import SPAWN, Bench, Tensors, wait
from slipstream.tools.lab.gpu_check.findings import Findings
from slipstream.tools.lab.gpu_check.publisher import NUM_REDUCED, REDUCED_SHAPE

SHAPE, NUM_TENSORS = (8960, 1536), 36  # 1 GB in bfloat16
NUM_VERSIONS = 2
DEADLINE_S = 20.0  # of a broadcast
ARRIVES_S = 60.0
MAX_EXTRA_BLOCKED_S = 0.5  # that an absent peer may cost the learner
POLL_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """One version at the stand-in."""

    transport: str
    version: int
    received_s: float  # with verification, from when it saw the offer
    copied_s: float  # to the device
    byte_sum: int  # of what is on the device


def check(findings: Findings, device: str) -> None:
    """Two runs on one Redis: without a GPU on either side, then with the same GPU on both if there is one."""
    shape, number = (REDUCED_SHAPE, NUM_REDUCED) if device == "cpu" else (SHAPE, NUM_TENSORS)
    tensors = [(f"w{index}", torch.randn(shape, device=device).bfloat16()) for index in range(number)]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as root, start_server(Path(root) / "redis") as server:
        bench = Bench(redis_url=server.secret_url, root=Path(root))
        _run(findings, bench, "gloo", tensors, device=device, publisher_device="cpu")
        if device == "cuda":
            _run(findings, bench, "one GPU", tensors, device=device, publisher_device="cuda")


def _run(findings: Findings, bench: Bench, run: str, tensors: Tensors, *, device: str, publisher_device: str) -> None:
    arrivals: "Queue[Arrived]" = SPAWN.Queue()
    actor = SPAWN.Process(target=_receive_all, args=(bench, run, device, arrivals), daemon=True)
    actor.start()
    bulletin = bench.bulletin(run)
    wait(lambda: "actor" in bulletin.broadcast_members())
    try:
        with bench.publishing(run, tensors, anchor_every=1, timeout_s=DEADLINE_S, device=publisher_device) as publisher:
            blocked_s = 0.0
            for version in range(NUM_VERSIONS):
                blocked_s = _publish(findings, publisher, tensors, version, arrivals, run)
            findings.require(f"{run}: every version was broadcast", publisher.stats.num_broadcasts == NUM_VERSIONS)
            if run == "gloo":
                _with_absent(findings, bench, publisher, tensors, arrivals, blocked_s)
    finally:
        actor.kill()
        actor.join()


def _with_absent(
    findings: Findings, bench: Bench, publisher: Publisher, tensors: Tensors, arrivals: "Queue[Arrived]", usual_s: float
) -> None:
    """One more version, with a member that is alive and never answers an invitation."""
    absent = BroadcastMember(connect(bench.redis_url), "gloo", "absent", secret=b"")
    bulletin = bench.bulletin("gloo")
    wait(lambda: "absent" in bulletin.broadcast_members())
    blocked_s = _publish(findings, publisher, tensors, NUM_VERSIONS, arrivals, "beside an absent peer")
    findings.at_most("an absent peer: the learner waits longer by", blocked_s - usual_s, MAX_EXTRA_BLOCKED_S, "s")
    absent.close()


def _publish(
    findings: Findings, publisher: Publisher, tensors: Tensors, version: int, arrivals: "Queue[Arrived]", what: str
) -> float:
    """Publish a version, and wait for both ways to bring it; return how long the learner waited."""
    for _, tensor in tensors:
        tensor += 1
    expected = sum(_byte_sum(tensor) for _, tensor in tensors)
    started = time.perf_counter()
    publisher.publish(tensors, policy_version=version)
    blocked_s = time.perf_counter() - started
    findings.note(f"{what}, version {version}: the learner waits", blocked_s, "s")
    for _ in range(2):
        arrived = arrivals.get(timeout=ARRIVES_S)
        name = f"{what}, version {version}, by {arrived.transport}"
        findings.note(f"{name}: received", arrived.received_s, "s")
        findings.note(f"{name}: copied to the device", arrived.copied_s, "s")
        findings.require(f"{name}: arrives whole", (arrived.version, arrived.byte_sum) == (version, expected))
    return blocked_s


def _receive_all(bench: Bench, run: str, device: str, arrivals: "Queue[Arrived]") -> None:
    """Receive every version twice, by broadcast and by a pull. Runs until it is killed."""
    gpu = None
    if run != "gloo":
        gpu = Gpu(uuid=str(torch.cuda.get_device_properties(device).uuid), device=torch.device(device))
    receivers = {
        "broadcast": Receiver(bench.receiver_info(run, "actor", "broadcast"), gpu=gpu),
        "pull": Receiver(bench.receiver_info(run, "other", "pull")),
    }
    bulletin, newest = bench.bulletin(run), -1
    while True:
        offer = bulletin.latest()
        if offer is None or offer.manifest.policy_version == newest:
            time.sleep(POLL_S)
            continue
        newest = offer.manifest.policy_version
        for transport, receiver in receivers.items():
            started = time.perf_counter()
            flat = receiver.receive(offer)
            received_s = time.perf_counter() - started
            on_device = flat.to(device)
            byte_sum = _byte_sum(on_device)
            copied_s = time.perf_counter() - started - received_s
            arrivals.put(
                Arrived(
                    transport=transport, version=newest, received_s=received_s, copied_s=copied_s, byte_sum=byte_sum
                )
            )


def _byte_sum(tensor: Tensor) -> int:
    return int(tensor.contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64))
