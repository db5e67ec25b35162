"""Shared by the parts of `make bench-weights`: runs with their own Redis, weights to publish, and waiting."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.actors.weights.receive import ReceiverInfo
from slipstream.common.config.learner_config import WeightsConfig
from slipstream.common.process.connection import connect
from slipstream.common.transfer.probe import Probe
from slipstream.common.transfer.weights import Offer, layout
from slipstream.learner.publisher.messages import ANCHOR_EVERY, PublisherSettings
from slipstream.learner.publisher.publish import Publisher
from slipstream.replay.fleet.bulletin import Bulletin

WEIGHTS = WeightsConfig()
TENSOR_SHAPE = (4096, 2048)  # bfloat16: 16 MiB, like a projection in a model with a few billion weights
NUM_TENSORS = 16
REPEATS = 9
NUM_RECEIVERS = 2
TIMEOUT_S = 300.0
POLL_S = 0.002
SPAWN = multiprocessing.get_context("spawn")

Tensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The Redis and the log folder of the runs of this benchmark."""

    redis_url: str
    root: Path

    @contextmanager
    def publishing(
        self, run: str, tensors: Tensors, *, anchor_every: int = ANCHOR_EVERY, learner_epoch: int = 0
    ) -> Iterator[Publisher]:
        """A publisher of `tensors`."""
        settings = PublisherSettings(
            entries=layout((name, dtype_of(tensor), tuple(tensor.shape)) for name, tensor in tensors),
            redis_url=self.redis_url,
            run_id=run,
            learner_epoch=learner_epoch,
            host=WEIGHTS.host,
            anchor_every=anchor_every,
            broadcast_timeout_s=TIMEOUT_S,
        )
        publisher = Publisher(settings, log_path=self.root / f"{run}.log")
        try:
            yield publisher
        finally:
            publisher.close()

    def bulletin(self, run: str) -> Bulletin:
        return Bulletin(connect(self.redis_url), run)

    def receiver_info(self, run: str, actor: str, transport: str) -> ReceiverInfo:
        return ReceiverInfo(redis_url=self.redis_url, run_id=run, actor=actor, transport=transport, timeout_s=TIMEOUT_S)


def large_tensors() -> Tensors:
    return [(f"w{index}", torch.randn(TENSOR_SHAPE).to(torch.bfloat16)) for index in range(NUM_TENSORS)]


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def publish_whole(
    publisher: Publisher,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    policy_version: int,
    probe: Probe | None = None,
) -> None:
    """Publish `tensors`, which this process has whole; the ranks of a learner publish by `VersionWriter`.

    Returns after the copy. Raises FencedOut, and NotTheLayout if they differ from it; then nothing is published.
    """
    slot, begun_at = publisher.free_slot(), time.perf_counter()
    publisher.slots.write(slot, tensors)
    publisher.submit(slot, policy_version=policy_version, probe=probe, copy_s=time.perf_counter() - begun_at)


def is_announced(publisher: Publisher, version: int) -> bool:
    return publisher.stats.announced.policy_version == version


def is_broadcast(publisher: Publisher, version: int) -> bool:
    return publisher.stats.num_broadcasts == version + 1


def offered(bulletin: Bulletin, policy_version: int) -> Offer:
    """The offer of `policy_version`, once it is the newest. Raises TimeoutError."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        offer = bulletin.latest()
        if offer is not None and offer.manifest.policy_version == policy_version:
            return offer
        if time.monotonic() > deadline:
            raise TimeoutError(f"version {policy_version} has not been offered within {TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


def wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition has not become true within {TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
