"""A part of `make bench-weights`: how long a learner waits in `publish` while a receiver fails."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier

import torch

from slipstream.actors.weights.receive import Receiver
from slipstream.actors.weights.refused import WeightsRefused
from slipstream.tools.lab.bench.benchmark import Row
from slipstream.tools.lab.bench.weights_stage import (
    NUM_RECEIVERS,
    POLL_S,
    REPEATS,
    SPAWN,
    TIMEOUT_S,
    Bench,
    is_announced,
    large_tensors,
    wait,
)


def disturbed(bench: Bench, fault: str) -> Row:
    """How long a learner waits in `publish` after a fault of one of two receivers, against before the fault."""
    tensors, run = large_tensors(), fault.replace(" ", "-")
    bulletin = bench.bulletin(run)
    receivers = [_receiver(bench, run, f"actor{rank}") for rank in range(NUM_RECEIVERS)]
    before_s, after_s = list[float](), list[float]()
    try:
        wait(lambda: len(bulletin.broadcast_members()) == NUM_RECEIVERS)
        with bench.publishing(run, tensors, anchor_every=1) as publisher, ExitStack() as fault_ends:
            for version in range(2 * REPEATS + 1):
                if version == REPEATS + 1:
                    fault_ends.enter_context(FAULTS[fault](receivers[0], partial(_receiver, bench, run)))
                publisher.publish(tensors, policy_version=version)
                if version:  # the first waits for the process to start
                    (before_s if version <= REPEATS else after_s).append(publisher.stats.blocked_s)
                # Not for its broadcast, which after a fault may have no end: the next copy runs beside it, always.
                wait(partial(is_announced, publisher, version))
    finally:
        for receiver in receivers:
            receiver.kill()
            receiver.join()
    return Row.of(
        f"publish while a receiver {fault}, against undisturbed",
        [1e3 * seconds for seconds in after_s],
        unit="ms",
        against=[1e3 * seconds for seconds in before_s],
        goal="ratio <= 1.1",
    )


@contextmanager
def _killed(receiver: BaseProcess, start: Callable[[str, Barrier], BaseProcess]) -> Iterator[None]:
    receiver.kill()
    yield


@contextmanager
def _stopped(receiver: BaseProcess, start: Callable[[str, Barrier], BaseProcess]) -> Iterator[None]:
    _signal(receiver, signal.SIGSTOP)
    yield


@contextmanager
def _slowed(receiver: BaseProcess, start: Callable[[str, Barrier], BaseProcess]) -> Iterator[None]:
    """Let the receiver run for a tenth of the time."""
    over = threading.Event()

    def slow_down() -> None:
        while not over.wait(0.01):
            _signal(receiver, signal.SIGSTOP)
            over.wait(0.09)
            _signal(receiver, signal.SIGCONT)

    thread = threading.Thread(target=slow_down)
    thread.start()
    yield
    over.set()
    thread.join()


@contextmanager
def _joined(receiver: BaseProcess, start: Callable[[str, Barrier], BaseProcess]) -> Iterator[None]:
    has_started = SPAWN.Barrier(2)
    newcomer = start("newcomer", has_started)
    has_started.wait(TIMEOUT_S)  # on real hosts, the start of an interpreter would not slow the learner's host
    yield
    newcomer.kill()
    newcomer.join()


FAULTS = {"is killed": _killed, "stands still": _stopped, "is slow": _slowed, "joins": _joined}


def _signal(process: BaseProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def _receiver(bench: Bench, run: str, actor: str, has_started: Barrier | None = None) -> BaseProcess:
    process = SPAWN.Process(target=_receive_for_ever, args=(bench, run, actor, has_started), daemon=True)
    process.start()
    return process


def _receive_for_ever(bench: Bench, run: str, actor: str, has_started: Barrier | None) -> None:
    torch.set_num_threads(1)
    if has_started is not None:
        has_started.wait(TIMEOUT_S)
    receiver, bulletin = Receiver(bench.receiver_info(run, actor, "broadcast")), bench.bulletin(run)
    version = -1
    while True:
        offer = bulletin.latest()
        if offer is None or offer.manifest.policy_version == version:
            time.sleep(POLL_S)
            continue
        with contextlib.suppress(WeightsRefused):  # a newer version is already on offer
            receiver.receive(offer)
        version = offer.manifest.policy_version
