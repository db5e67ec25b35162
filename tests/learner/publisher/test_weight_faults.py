"""Faults on the weight plane: whom they hurt, whom not, and how it continues. Deltas travel wherever they can."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from slipstream.actors.weights.broadcast_receiver import Place
from slipstream.actors.weights.receive import Receiver, ReceiverInfo
from slipstream.actors.weights.refused import WeightsRefused
from slipstream.common.process.connection import connect
from slipstream.common.transfer.weights import buffer_bytes, layout
from slipstream.learner.publisher.messages import Submitted, Withdraw
from slipstream.learner.publisher.publish import Publisher
from slipstream.replay.fleet.bulletin import BroadcastGroup, Bulletin
from slipstream.replay.records import keys
from slipstream.replay.records.keys import FencedOut
from slipstream.tools.lab.bench.weights_stage import publish_whole
from tests.learner.publisher.offers import publisher_settings
from tests.learner.publisher.test_weight_deltas import nudged
from tests.learner.publisher.test_weights import Plane, Received, Tensors, flat_bytes, next_of, spawned, weights
from tests.waiting import beside, wait_until

NUM_ROWS = 30_000
SLACK = 100  # 5 ms without a fault; whoever waited for a receiver would wait for its deadline, of seconds

Hook = Callable[[int, torch.Tensor], None]


def nothing(number: int, buffer: torch.Tensor) -> None:
    """No fault."""


class Follower:
    """An actor that does nothing but take versions, on the thread that runs it. What is refused it tries again."""

    def __init__(self, info: ReceiverInfo, *, before: Hook = nothing, after: Hook = nothing) -> None:
        """`before` its bytes come, and `after` the last one, is called with the number of the broadcast, from 1."""
        self._bulletin = Bulletin(connect(info.redis_url), info.run_id)
        self._receiver = Receiver(info)
        self._before, self._after, self._num_broadcasts = before, after, 0
        if member := self._receiver._member:
            self._receive_chunks = member._receive_chunks
            member._receive_chunks = self._struck  # type: ignore[method-assign]

    def follow(self, take: Callable[[int, bytes], None], closing: threading.Event) -> None:
        version = -1
        while not closing.is_set():
            offer = self._bulletin.latest()
            if offer is not None and offer.manifest.policy_version > version:
                try:
                    buffer = self._receiver.receive(offer)
                except WeightsRefused:
                    continue
                version = offer.manifest.policy_version
                take(version, bytes(buffer.numpy()))
            time.sleep(0.02)
        self._receiver.close()

    def _struck(self, sealed: BroadcastGroup, place: Place, deadline: float) -> None:
        self._num_broadcasts += 1
        self._before(self._num_broadcasts, place.buffer)

        def arrived(num_bytes: int) -> None:
            if num_bytes == place.buffer.nbytes:
                self._after(self._num_broadcasts, place.buffer)
            place.arrived(num_bytes)

        self._receive_chunks(sealed, Place(buffer=place.buffer, arrived=arrived), deadline)


@contextmanager
def following(info: ReceiverInfo, *, before: Hook = nothing, after: Hook = nothing) -> Iterator[dict[int, bytes]]:
    """A follower on a thread of this process: what it has received, by version."""
    received: dict[int, bytes] = {}
    follower = Follower(info, before=before, after=after)
    with beside(partial(follower.follow, received.__setitem__)):
        yield received


def follow_until_struck(info: ReceiverInfo, fault: str, number: int, received: "Queue[Received]") -> None:
    """A follower that sends itself the signal `fault` in its broadcast of this number; "" for none.

    The second message, of version -2, is its process id.
    """
    # As in an actor, where the inference engine has taken the default group.
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def strike(now: int, buffer: torch.Tensor) -> None:
        if fault and now == number:
            os.kill(os.getpid(), signal.Signals[fault])

    follower = Follower(info, before=strike)
    received.put((info.actor, -1, b""))
    received.put((info.actor, -2, str(os.getpid()).encode()))
    follower.follow(lambda version, data: received.put((info.actor, version, data)), threading.Event())


class Versions:
    """Publishes one nudged version after the other, and notes how long each publish held its learner up."""

    def __init__(self, publisher: Publisher, plane: Plane) -> None:
        self.publisher, self.plane, self.bulletin = publisher, plane, plane.bulletin
        self.newest = -1
        self.blocked_s: list[float] = []
        self._tensors: Tensors = weights(0, NUM_ROWS)

    def publish(self) -> bytes:
        """Publish the next version and return its bytes, once it is announced."""
        self.newest += 1
        if self.newest:
            self._tensors = nudged(self._tensors, seed=self.newest)
        begun_at = time.perf_counter()
        publish_whole(self.publisher, self._tensors, policy_version=self.newest)
        self.blocked_s.append(time.perf_counter() - begun_at)
        self.plane.wait_for(self.newest)
        return flat_bytes(self._tensors)

    def group(self) -> list[str]:
        """Who takes part in the newest version's broadcast; no one before that is settled."""
        offer = self.bulletin.latest()
        sealed = self.bulletin.sealed_group(offer.invitation.number) if offer.invitation else None
        return sealed.actors if sealed else []

    def wait_for_members(self, *actors: str) -> None:
        wait_until(lambda: self.bulletin.broadcast_members() == sorted(actors), f"{actors} to join")


class Halt:
    """Stops a follower before the bytes of one of its broadcasts come, until it may continue."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.under_way, self.go_on = threading.Event(), threading.Event()

    def __call__(self, number: int, buffer: torch.Tensor) -> None:
        if number == self._number:
            self.under_way.set()
            assert self.go_on.wait(60)


def reached(received: dict[int, bytes], version: int, published: bytes) -> None:
    """Wait for `version`, and compare its bytes."""
    wait_until(lambda: version in received, f"version {version} to arrive")
    assert received[version] == published


def slowed(pid: int) -> AbstractContextManager[None]:
    """The process runs for a tenth of the time."""

    def throttle(over: threading.Event) -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(0.18)
            os.kill(pid, signal.SIGCONT)
            over.wait(0.02)

    return beside(throttle)


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", pytest.param("slow", marks=pytest.mark.long)])
def test_a_member_that_fails_in_mid_broadcast_costs_neither_learner_nor_others(fault: str, plane: Plane) -> None:
    doomed = plane.info("doomed", "broadcast")
    strikes = "" if fault == "slow" else fault
    with (
        plane.publishing(anchor_every=9, broadcast_timeout_s=4.0, num_rows=NUM_ROWS) as publisher,
        spawned((follow_until_struck, (doomed, strikes, 4))) as of_doomed,
        following(plane.info("good", "broadcast")) as good,
    ):
        versions, publishing = Versions(publisher, plane), publisher._process.pid
        pid = int(next_of(of_doomed, "doomed")[1])
        versions.wait_for_members("doomed", "good")
        for version in range(3):  # whole, and two deltas
            published = versions.publish()
            assert next_of(of_doomed, "doomed") == (version, published)
            reached(good, version, published)
            assert versions.group() == ["doomed", "good"]

        with slowed(pid) if fault == "slow" else contextlib.nullcontext():
            for version in range(3, 6):
                reached(good, version, versions.publish())
        if fault != "slow":
            wait_until(lambda: versions.group() == ["good"], "a group without the one that failed")
        undisturbed, disturbed = versions.blocked_s[:3], versions.blocked_s[3:]
        assert max(disturbed) < SLACK * max(undisturbed), "the learner waited for a receiver"
        assert publisher._process.pid == publishing
        if fault == "SIGKILL":
            return

        os.kill(pid, signal.SIGCONT)
        versions.wait_for_members("doomed", "good")
        published = versions.publish()
        while (arrived := next_of(of_doomed, "doomed"))[0] < versions.newest:
            pass
        assert arrived == (versions.newest, published), "it goes on where the others are"
        reached(good, versions.newest, published)
        versions.wait_for_members("doomed", "good")
        published = versions.publish()
        wait_until(lambda: versions.group() == ["doomed", "good"], "it to take part again")
        assert next_of(of_doomed, "doomed") == (versions.newest, published)


@pytest.mark.parametrize("broadcast", [pytest.param(1, marks=pytest.mark.long), 2], ids=["whole", "delta"])
def test_bytes_that_a_broadcast_spoils_are_refused_and_pulled(broadcast: int, plane: Plane) -> None:
    spoilt = list[int]()

    def spoil(number: int, buffer: torch.Tensor) -> None:
        if number == broadcast:
            buffer[-100] ^= 1
            spoilt.append(number)

    with (
        plane.publishing(anchor_every=9, num_rows=NUM_ROWS) as publisher,
        following(plane.info("a", "broadcast"), after=spoil) as received,
    ):
        versions = Versions(publisher, plane)
        versions.wait_for_members("a")
        for version in range(3):
            reached(received, version, versions.publish())
            assert versions.group() == ["a"]
    assert spoilt == [broadcast]


def test_who_joins_in_mid_broadcast_pulls_that_version_and_takes_part_in_the_next(plane: Plane) -> None:
    halt = Halt(1)
    with (
        plane.publishing(anchor_every=9, num_rows=NUM_ROWS, broadcast_timeout_s=60) as publisher,
        following(plane.info("first", "broadcast"), before=halt) as first,
    ):
        versions = Versions(publisher, plane)
        versions.wait_for_members("first")
        published = versions.publish()
        assert halt.under_way.wait(60)
        with following(plane.info("newcomer", "broadcast")) as newcomer:
            reached(newcomer, 0, published)
            assert first == {} and versions.group() == ["first"]
            halt.go_on.set()
            reached(first, 0, published)
            versions.wait_for_members("first", "newcomer")
            published = versions.publish()
            reached(first, 1, published)
            reached(newcomer, 1, published)
            assert versions.group() == ["first", "newcomer"]


def test_a_publisher_killed_in_mid_send_is_replaced_and_its_version_arrives(plane: Plane) -> None:
    halt = Halt(3)
    with (
        plane.publishing(anchor_every=9, num_rows=NUM_ROWS) as publisher,
        following(plane.info("a", "broadcast"), before=halt) as received,
    ):
        versions = Versions(publisher, plane)
        versions.wait_for_members("a")
        for version in range(2):
            reached(received, version, versions.publish())
        published = versions.publish()
        assert halt.under_way.wait(60)
        killed = publisher._process.pid
        os.kill(killed, signal.SIGKILL)
        halt.go_on.set()
        wait_until(lambda: publisher._process.pid != killed, "the death to be noticed")
        reached(received, 2, published)
        assert plane.offer().manifest.deltas == [], "a new process knows of no version before it"
        for version in (3, 4):
            reached(received, version, versions.publish())
            wait_until(lambda: versions.group() == ["a"], "the group of the new process")
        assert len(plane.offer().manifest.deltas) == 2
        assert max(versions.blocked_s[3:]) < SLACK * max(versions.blocked_s[:2]), "the learner waited"


def test_a_learner_back_at_an_older_version_publishes_it_under_a_new_number_and_receivers_follow(plane: Plane) -> None:
    plane.client.set(keys.epoch_key(plane.run_id), 1)
    with (
        plane.publishing(anchor_every=9, learner_epoch=1, num_rows=NUM_ROWS) as older,
        following(plane.info("near", "broadcast")) as near,
        following(plane.info("far", "pull")) as far,
    ):
        versions = Versions(older, plane)
        versions.wait_for_members("near")
        for version in range(3):
            published = versions.publish()
            for received in (near, far):
                reached(received, version, published)
        plane.client.set(keys.epoch_key(plane.run_id), 2)
        with plane.publishing(anchor_every=9, learner_epoch=2, num_rows=NUM_ROWS) as newer:
            again = nudged(weights(0, NUM_ROWS), seed=1)  # version 1, as its checkpoint holds it
            for version, tensors in {3: again, 4: nudged(again, seed=7)}.items():
                publish_whole(newer, tensors, policy_version=version)
                reached(near, version, flat_bytes(tensors))
                reached(far, version, flat_bytes(tensors))

            def refused() -> bool:
                try:
                    publish_whole(older, weights(9, NUM_ROWS), policy_version=9)
                except FencedOut as error:
                    return "epoch 2 has taken over from epoch 1" in str(error)
                return False

            wait_until(refused, "the older learner to hear of it")
            assert plane.offer().manifest.policy_version == 4


def test_a_publisher_whose_learner_is_gone_ends_in_order(plane: Plane) -> None:
    """Though it has something to say to it: that slots are free again."""
    entries = layout([("w", "float32", (4,))])
    settings = publisher_settings(plane.redis_url, plane.run_id, entries, broadcast_timeout_s=1.0)
    slots = [os.memfd_create(f"slot-{number}") for number in range(3)]
    for slot in slots:
        os.ftruncate(slot, buffer_bytes(entries))
    ours, theirs = socket.socketpair()
    fds = [theirs.fileno(), *slots]
    command = [sys.executable, "-m", "slipstream.learner.publisher.weight_server", *map(str, fds)]
    process = subprocess.Popen(command, pass_fds=fds, stderr=subprocess.PIPE, text=True)
    theirs.close()
    with Connection(ours.detach()) as connection:
        for message in [settings, *(Submitted(slot=slot, policy_version=slot) for slot in range(3)), Withdraw()]:
            connection.send_bytes(msgspec.msgpack.encode(message))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in said, said
    for slot in slots:
        os.close(slot)
