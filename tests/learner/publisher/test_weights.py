"""The weight plane with real processes: what a receiver ends up with, and what the learner never waits for."""

import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import torch
from torch._C._distributed_c10d import HashStore

from slipstream.actors.weights.broadcast_receiver import BroadcastMember, BroadcastMissed
from slipstream.actors.weights.receive import Receiver, ReceiverInfo
from slipstream.common.process.connection import connect
from slipstream.common.transfer.weights import Invitation, Manifest, Offer, TensorEntry, layout, sealed
from slipstream.learner.publisher.broadcast_sender import backend_of
from slipstream.learner.publisher.messages import Freed, Submitted
from slipstream.learner.publisher.publish import Publisher
from slipstream.learner.publisher.shelf import Shelf
from slipstream.replay.fleet.bulletin import Acknowledgement, Bulletin
from slipstream.replay.records import keys
from slipstream.replay.records.keys import FencedOut
from slipstream.tools.lab.bench.weights_stage import publish_whole
from tests.learner.publisher.offers import publisher_settings
from tests.replay.buffer.every_verb import GROUP
from tests.waiting import wait_until

CHUNK_BYTES = 64 << 10
SPAWN = multiprocessing.get_context("forkserver")  # whose children begin with the imports of this module
SPAWN.set_forkserver_preload([__name__])
Tensors = list[tuple[str, torch.Tensor]]
Received = tuple[str, int, bytes]


def weights(seed: int, num_rows: int = 1000) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("embed", torch.randn(num_rows, 96, generator=generator)),
        ("norm", torch.randn(97, generator=generator).to(torch.bfloat16)),
        ("scale", torch.tensor(float(seed))),
        ("tied", torch.randn(50, 33, generator=generator).t()),  # not contiguous
        ("half", torch.randn(3, 5, 7, generator=generator).to(torch.float16)),
    ]


def entries_of(tensors: Tensors) -> list[TensorEntry]:
    return layout((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors)


def flat_bytes(tensors: Tensors) -> bytes:
    """The bytes as a receiver should have them, put together here without the code that is tested."""
    flat = b""
    for _, tensor in tensors:
        data = bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())
        flat += data + bytes(-len(data) % 64)
    return flat


def receiver_info(redis_url: str, run_id: str, actor: str, transport: str, **others: Any) -> ReceiverInfo:
    usual = {"chunk_bytes": CHUNK_BYTES, "timeout_s": 30.0}
    place = {"redis_url": redis_url, "run_id": run_id, "actor": actor, "transport": transport}
    return ReceiverInfo(**place, **(usual | others))


def receive_all(info: ReceiverInfo, received: "Queue[Received]", *, gpu: torch.device | None = None) -> None:
    """An actor that does nothing but receive: puts (actor, version, bytes), first of all version -1 when it is up."""
    # As in an actor, where the inference engine has taken the default group.
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    bulletin = Bulletin(connect(info.redis_url), info.run_id)
    receiver = Receiver(info, gpu=gpu)
    received.put((info.actor, -1, b""))
    version = -1
    while True:
        offer = bulletin.latest()
        if offer is not None and offer.manifest.policy_version > version:
            buffer = receiver.receive(offer)
            version = offer.manifest.policy_version
            received.put((info.actor, version, bytes(buffer.numpy())))
        time.sleep(0.02)


@contextmanager
def spawned(*targets: tuple[Callable[..., None], tuple[object, ...]]) -> Iterator["Queue[Received]"]:
    """Processes that are up, each given the queue as its last argument; killed at the end."""
    received: Queue[Received] = SPAWN.Queue()
    processes = [SPAWN.Process(target=target, args=(*args, received), daemon=True) for target, args in targets]
    try:
        for process in processes:
            process.start()
        for _ in processes:
            received.get(timeout=90)
        yield received
    finally:
        for process in processes:
            process.kill()
            process.join()
        received.close()


@contextmanager
def publishing(
    redis_url: str, run_id: str, tmp_path: Path, *, num_rows: int = 1000, **settings: Any
) -> Iterator[Publisher]:
    given = publisher_settings(redis_url, run_id, entries_of(weights(0, num_rows)), **settings)
    with closing(Publisher(given, log_path=tmp_path / "publisher.log")) as publisher:
        yield publisher


@dataclass(frozen=True, slots=True)
class Plane:
    """What travels between the publishers and the receivers of one run."""

    redis_url: str
    client: redis.Redis
    run_id: str
    folder: Path

    @property
    def bulletin(self) -> Bulletin:
        return Bulletin(self.client, self.run_id)

    def publishing(self, **named: Any) -> AbstractContextManager[Publisher]:
        return publishing(self.redis_url, self.run_id, self.folder, **named)

    def info(self, actor: str, transport: str, **named: Any) -> ReceiverInfo:
        return receiver_info(self.redis_url, self.run_id, actor, transport, **named)

    def offer(self) -> Offer:
        """The newest one."""
        return self.bulletin.latest()

    def wait_for(self, version: int) -> None:
        bulletin = self.bulletin
        wait_until(lambda: latest_version(bulletin) == version, f"version {version}")


def latest_version(bulletin: Bulletin) -> int:
    offer = bulletin.latest()
    return -1 if offer is None else offer.manifest.policy_version


def next_of(received: "Queue[Received]", actor: str) -> tuple[int, bytes]:
    """The next version that `actor` received; others may not receive meanwhile."""
    name, version, data = received.get(timeout=60)
    assert name == actor
    return version, data


def test_a_group_uses_nccl_only_if_each_member_has_a_gpu_of_its_own() -> None:
    assert backend_of(("GPU-1", "GPU-2", "GPU-3")) == "nccl"
    for sharing in (("GPU-1", "GPU-1"), ("GPU-1", "GPU-2", "GPU-2")):
        assert backend_of(sharing) == "gloo"
    for without in (("GPU-1", "cpu"), ("cpu", "GPU-1"), ("cpu", "cpu")):
        assert backend_of(without) == "gloo"


def test_broadcast_and_pull_in_one_run_bring_the_same_bytes(device: torch.device, plane: Plane) -> None:
    """Learner and actors share a GPU if there is one: NCCL refuses that, so broadcasts go over gloo."""
    gpu = device if device.type == "cuda" else None
    infos = [plane.info("near0", "broadcast"), plane.info("near1", "broadcast"), plane.info("far", "pull")]
    with (
        spawned(*((partial(receive_all, gpu=gpu), (info,)) for info in infos)) as received,
        plane.publishing(device=str(device)) as publisher,
    ):
        for version in (1, 2):
            version_on_device = [(name, tensor.to(device)) for name, tensor in weights(version)]
            publish_whole(publisher, version_on_device, policy_version=version)
            arrivals = sorted(received.get(timeout=60) for _ in infos)
            assert arrivals == [(name, version, flat_bytes(weights(version))) for name in ("far", "near0", "near1")]
        wait_until(lambda: publisher.stats.announced.policy_version == 2, "the report of both versions")
        wait_until(lambda: publisher.stats.num_broadcasts == 2, "the report of both broadcasts")
        sealed_groups = [plane.bulletin.sealed_group(number) for number in (1, 2)]
        members = [(group.number, group.actors) for group in sealed_groups]
        assert members == [(1, ["near0", "near1"])] * 2, "the group is used again"

        for tensors, why in (
            (weights(3)[1:], r"missing: \['embed'\]"),
            ([("ids", torch.arange(3))], r"ids is torch.int64 \[3\]; the layout has no tensor of that name"),
            ([("norm", torch.zeros(97))], r"norm is torch.float32 \[97\]; the layout has torch.bfloat16 \[97\]"),
        ):
            with pytest.raises(ValueError, match=why):
                publish_whole(publisher, tensors, policy_version=3)
        publish_whole(publisher, weights(4), policy_version=4)
        plane.wait_for(4)


def test_the_learner_holds_one_tensor_while_it_publishes(plane: Plane) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(1):
            assert not any(ref() is not None for ref in made), "a tensor was alive when the next was gathered"
            whole = tensor.clone()
            made.append(weakref.ref(whole))
            yield name, whole
            del whole

    with plane.publishing() as publisher:
        publish_whole(publisher, gathered(), policy_version=1)
    assert len(made) == 5


def test_a_publisher_that_dies_while_the_learner_waits_for_actors_is_replaced(plane: Plane) -> None:
    with plane.publishing() as publisher:
        first = publisher._process.pid
        publish_whole(publisher, weights(1), policy_version=1)
        os.kill(first, signal.SIGKILL)  # before it could announce anything: it imports torch for seconds
        wait_until(lambda: publisher._process.pid != first, "another process")
        plane.wait_for(1)
        second = publisher._process.pid
        os.kill(second, signal.SIGKILL)
        publish_whole(publisher, weights(2), policy_version=2)  # before its death is noticed
        plane.wait_for(2)
        assert publisher._process.pid not in (first, second)
        with closing(Receiver(plane.info("a", "pull"))) as receiver:
            assert bytes(receiver.receive(plane.offer()).numpy()) == flat_bytes(weights(2))
    assert "slipstream-weights" not in Path("/proc/self/maps").read_text()


def publish_and_wait(redis_url: str, run_id: str, tmp_path: Path, pids: "Queue[int]") -> None:
    with publishing(redis_url, run_id, tmp_path) as publisher:
        publish_whole(publisher, weights(1), policy_version=1)
        wait_until(lambda: publisher.stats.announced.policy_version == 1, "version 1")
        pids.put(publisher._process.pid)
        time.sleep(600)


def test_a_killed_learner_takes_its_publisher_process_along(plane: Plane) -> None:
    pids: Queue[int] = SPAWN.Queue()
    learner = SPAWN.Process(target=publish_and_wait, args=(plane.redis_url, plane.run_id, plane.folder, pids))
    learner.start()
    publisher_pid = pids.get(timeout=90)
    learner.kill()
    learner.join()
    wait_until(lambda: not Path(f"/proc/{publisher_pid}").exists(), "the publisher process to end")
    pids.close()
    learner.close()


def manifest_of(tensors: Tensors, **numbers: int) -> Manifest:
    return sealed(entries_of(tensors), memoryview(flat_bytes(tensors)), **numbers)


def announce(
    bulletin: Bulletin, seed: int, *, policy_version: int, learner_epoch: int = 1, endpoint: str = "tcp://127.0.0.1:1"
) -> None:
    manifest = manifest_of(weights(seed), policy_version=policy_version, learner_epoch=learner_epoch)
    bulletin.announce(Offer(manifest=manifest, pull_endpoint=endpoint))


def test_offers_move_forward_only_and_for_the_newest_learner_only(plane: Plane) -> None:
    bulletin = plane.bulletin
    assert bulletin.latest() is None
    announce(bulletin, 5, policy_version=5)
    with pytest.raises(FencedOut, match="version 5 is on offer already, and version 4 is not newer"):
        announce(bulletin, 4, policy_version=4)
    with pytest.raises(FencedOut, match="5 is not newer"):  # other bytes under the same number
        announce(bulletin, 6, policy_version=5, learner_epoch=2)
    # The same bytes at a new address.
    announce(bulletin, 5, policy_version=5, learner_epoch=2, endpoint="tcp://127.0.0.1:2")
    assert plane.offer().pull_endpoint == "tcp://127.0.0.1:2"
    plane.client.set(keys.epoch_key(plane.run_id), 3)
    with pytest.raises(FencedOut, match="epoch 3 has taken over from epoch 2"):
        announce(bulletin, 6, policy_version=6, learner_epoch=2)
    assert latest_version(bulletin) == 5


def test_an_actor_gets_an_offer_as_soon_as_it_is_announced(plane: Plane) -> None:
    bulletin = plane.bulletin
    assert bulletin.later(-1, wait_s=0.01) is None
    with ThreadPoolExecutor(1) as executor:
        for version in (0, 7):
            waiting = executor.submit(bulletin.later, version - 1, wait_s=60.0)
            announce(bulletin, 5, policy_version=version)
            offer = waiting.result(timeout=30)
            assert offer == bulletin.latest() == bulletin.later(-1, wait_s=0.0)
            assert offer.manifest.policy_version == version
    assert bulletin.later(7, wait_s=0.01) is bulletin.later(7, wait_s=0.0) is bulletin.later(99, wait_s=0.0) is None


@pytest.mark.parametrize(
    ("damaged", "after"), [(("weights", "latest", "versions"), 5), (("weights", "latest"), 4)], ids=["stream", "offer"]
)
def test_no_actor_asks_at_once_again_for_a_damaged_offer(damaged: tuple[str, ...], after: int, plane: Plane) -> None:
    bulletin = plane.bulletin
    announce(bulletin, 5, policy_version=5)
    plane.client.set(keys.key(plane.run_id, *damaged), "garbage")
    begun = time.monotonic()
    assert bulletin.later(after, wait_s=0.2) is None
    assert time.monotonic() - begun >= 0.2
    announce(bulletin, 5, policy_version=5, endpoint="tcp://127.0.0.1:2")  # which replaces both
    assert bulletin.later(4, wait_s=60.0).pull_endpoint == "tcp://127.0.0.1:2"


def test_an_offer_that_the_server_lost_before_it_was_announced_is_not_announced(plane: Plane) -> None:
    """As a replica that took over in between."""
    bulletin = plane.bulletin
    names = [keys.key(plane.run_id, "weights", part) for part in ("version", "latest", "lost", "number")]
    with pytest.raises(redis.ResponseError, match="the staged offer of version 1 is missing"):
        bulletin._announce(keys=[keys.epoch_key(plane.run_id), *names], args=[1, 1, "root"])
    assert bulletin.latest() is None


def test_an_acknowledgement_has_a_time_to_live_from_the_start(plane: Plane) -> None:
    with connect(plane.redis_url) as client:
        commands: list[str] = []
        bulletin = Bulletin(client, plane.run_id)
        with client.monitor() as monitor:  # type: ignore[no-untyped-call]
            bulletin.acknowledge(7, "a", Acknowledgement(held_group=0, device="cpu", root=""))
            while not commands or commands[-1] != "EXEC":
                commands.append(monitor.next_command()["command"].split()[0])
        assert commands[-4:] == ["MULTI", "HSET", "EXPIRE", "EXEC"]


def test_a_member_that_leaves_or_falls_silent_is_not_invited(plane: Plane) -> None:
    bulletin = plane.bulletin
    bulletin.join_broadcast("silent", ttl_s=1.5)
    bulletin.join_broadcast("leaving", ttl_s=60)
    bulletin.join_broadcast("staying", ttl_s=60)
    assert bulletin.broadcast_members() == ["leaving", "silent", "staying"]
    bulletin.leave_broadcast("leaving")
    wait_until(lambda: bulletin.broadcast_members() == ["staying"], "the silent one to expire")


@pytest.mark.parametrize(
    ("host", "sealed_for", "why"),
    [
        ("127.0.0.1", "b", "invitation 1 was sealed without a"),
        ("no-such-host.invalid", "a", "group 1 failed: "),  # any other error would count as weights that do not fit
    ],
)
def test_a_member_misses_a_broadcast_and_an_invitation_is_good_for_one_attempt(
    host: str, sealed_for: str, why: str, plane: Plane
) -> None:
    bulletin = plane.bulletin
    member = BroadcastMember(plane.client, plane.run_id, "a", secret=b"")
    invitation = Invitation(number=bulletin.next_invitation(), actors=["a", "b"])
    group = msgspec.structs.replace(GROUP, number=invitation.number, host=host, actors=[sealed_for])
    bulletin.seal(invitation.number, group)
    for reason in (why, "invitation 1 was used before"):
        with pytest.raises(BroadcastMissed, match=reason):
            member.receive(invitation, root="", place=lambda blob: pytest.fail("nothing was to be received"))
    member.close()
    assert bulletin.broadcast_members() == []


def test_a_version_whose_offer_redis_has_lost_is_offered_again(plane: Plane) -> None:
    with plane.publishing() as publisher:
        publish_whole(publisher, weights(1), policy_version=1)
        plane.wait_for(1)
        saved = {name: plane.client.dump(name) for name in plane.client.scan_iter(f"*{plane.run_id}*weights:*")}
        publish_whole(publisher, weights(2), policy_version=2)
        plane.wait_for(2)
        for name, value in saved.items():
            plane.client.restore(name, 0, value, replace=True)
        assert len(saved) >= 3 and latest_version(plane.bulletin) == 1
        plane.wait_for(2)


def test_the_newest_version_takes_the_place_of_one_that_was_not_begun() -> None:
    shelf = Shelf()
    manifest = manifest_of(weights(1), policy_version=1, learner_epoch=0)
    assert shelf.submit(Submitted(slot=0, policy_version=1)) == []
    assert shelf.take(0.0).policy_version == 1
    assert shelf.submit(Submitted(slot=1, policy_version=2)) == []
    assert shelf.submit(Submitted(slot=2, policy_version=3)) == [Freed(slot=1)]
    assert shelf.serve(manifest, None, slot=0) == []
    assert shelf.take(0.0).policy_version == 3


def test_a_learner_without_a_slot_gets_the_one_that_is_needed_least() -> None:
    shelf = Shelf()
    manifest = manifest_of(weights(1), policy_version=1, learner_epoch=0)
    for slot in (0, 1):
        shelf.submit(Submitted(slot=slot, policy_version=slot))
        shelf.take(0.0)
        assert shelf.serve(manifest, None, slot=slot) == []  # 0 becomes the previous one, 1 the served one
    shelf.submit(Submitted(slot=2, policy_version=2))
    assert shelf.withdraw() == [Freed(slot=2)]
    assert shelf.withdraw() == [Freed(slot=0)]
    assert shelf.withdraw() == []
