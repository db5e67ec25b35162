"""Deltas on the weight plane: which way a receiver takes to the newest version, and what it does when that fails."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import torch
import xxhash

from slipstream.actors.weights.receive import Receiver
from slipstream.actors.weights.refused import WeightsRefused
from slipstream.common.transfer.chunk_server import ChunkServer, ServerLimits
from slipstream.common.transfer.chunks import Blob, ChunkRequest
from slipstream.common.transfer.delta import encode_delta
from slipstream.common.transfer.weights import Manifest, Offer, WeightsError, check_blob, sealed
from slipstream.learner.publisher.lineage import continued
from slipstream.tools.lab.bench.weights_stage import publish_whole
from tests.learner.publisher.test_weights import (
    CHUNK_BYTES,
    Plane,
    Tensors,
    entries_of,
    flat_bytes,
    next_of,
    receive_all,
    receiver_info,
    spawned,
    weights,
)
from tests.waiting import wait_until


def nudged(tensors: Tensors, *, seed: int, one_in: int = 100) -> Tensors:
    """The same tensors with one element in so many changed."""
    generator = torch.Generator().manual_seed(seed)
    changed = []
    for name, tensor in tensors:
        chosen = torch.rand(tensor.shape, generator=generator) < 1 / one_in
        changed.append((name, torch.where(chosen, tensor + 1, tensor)))
    return changed


def nudged_versions(count: int, *, one_in: int = 100) -> list[Tensors]:
    """As many versions, each nudged from the one before; the index is the version."""
    versions = [weights(0)]
    while len(versions) < count:
        versions.append(nudged(versions[-1], seed=len(versions), one_in=one_in))
    return versions


@dataclass(frozen=True, kw_only=True)
class History:
    """Versions as a publisher has them, and a server of their blobs that notes what it is asked for."""

    manifests: list[Manifest]  # by version
    blobs: dict[str, bytes]
    endpoint: str
    asked: list[str] = field(default_factory=list)  # roots, each once in a row

    def receive(self, receiver: Receiver, version: int) -> tuple[bytes, list[str]]:
        """The bytes of `version`, and the roots of what travelled for it."""
        self.asked.clear()
        buffer = receiver.receive(Offer(manifest=self.manifests[version], pull_endpoint=self.endpoint))
        return bytes(buffer.numpy()), self.asked.copy()

    def delta_to(self, version: int) -> str:
        """The root of the delta that leads to `version` from the one before it."""
        return self.manifests[version].deltas[-1].blob.root


@contextmanager
def history(versions: list[Tensors], *, anchor_every: int) -> Iterator[History]:
    entries = entries_of(versions[0])
    manifests: list[Manifest] = []
    blobs: dict[str, bytes] = {}
    for version, tensors in enumerate(versions):
        data = flat_bytes(tensors)
        manifest = sealed(entries, memoryview(data), policy_version=version, learner_epoch=0)
        blobs[manifest.root] = data
        if manifests:
            delta = encode_delta(memoryview(blobs[manifests[-1].root]), memoryview(data), entries)
            manifest = continued(manifest, manifests[-1], delta, anchor_every=anchor_every)
            blobs[manifest.deltas[-1].blob.root] = delta
        manifests.append(manifest)
    asked: list[str] = []

    def read(request: ChunkRequest) -> bytes | None:
        if asked[-1:] != [request.root]:
            asked.append(request.root)
        return blobs[request.root][request.offset : request.offset + request.num_bytes]

    with closing(ChunkServer("127.0.0.1", read, limits=ServerLimits(chunk_bytes=CHUNK_BYTES), key=None)) as server:
        yield History(manifests=manifests, blobs=blobs, endpoint=server.endpoint, asked=asked)


def a_receiver() -> AbstractContextManager[Receiver]:
    return closing(Receiver(receiver_info("redis://unused", "unused", "a", "pull")))


def test_every_third_version_is_an_anchor_and_the_deltas_reach_back_to_the_one_before_it() -> None:
    with history(nudged_versions(8), anchor_every=3) as past:
        roots = [manifest.root for manifest in past.manifests]
        anchors = [manifest.anchor and roots.index(manifest.anchor.root) for manifest in past.manifests]
        bases = [[roots.index(delta.base) for delta in manifest.deltas] for manifest in past.manifests]
    assert anchors == [None, 0, 0, None, 3, 3, None, 6]
    assert bases == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [3, 4, 5], [3, 4, 5, 6]]


def test_weights_that_stay_as_they_are_make_no_longer_manifest() -> None:
    first, second, third = nudged_versions(3)
    with history([first, *[second] * 20, third], anchor_every=3) as past, a_receiver() as current, a_receiver() as new:
        assert max(len(manifest.deltas) for manifest in past.manifests) <= 3
        for version, tensors in {0: first, 1: second, 2: second, 20: second, 21: third}.items():
            assert past.receive(current, version)[0] == flat_bytes(tensors)
        assert past.receive(new, 21)[0] == flat_bytes(third)


def test_a_version_is_an_anchor_when_a_newcomer_would_pull_more_in_deltas_than_in_whole_weights() -> None:
    # One element in five, in both of its bytes: four tenths of the whole.
    with history(nudged_versions(7, one_in=5), anchor_every=100) as past:
        anchors = [number for number, manifest in enumerate(past.manifests) if manifest.anchor is None]
    assert anchors == [0, 3, 6] and len(past.manifests) == 7


def test_a_receiver_takes_the_deltas_it_lacks_and_who_is_new_or_was_away_for_too_long_the_anchor_first() -> None:
    versions = nudged_versions(8)
    with history(versions, anchor_every=3) as past, a_receiver() as receiver, a_receiver() as newcomer:
        root, delta_to = [manifest.root for manifest in past.manifests], past.delta_to
        assert past.receive(receiver, 0) == (flat_bytes(versions[0]), [root[0]])
        assert past.receive(receiver, 1) == (flat_bytes(versions[1]), [delta_to(1)])
        assert past.receive(receiver, 3) == (flat_bytes(versions[3]), [delta_to(2), delta_to(3)])
        assert past.receive(receiver, 3) == (flat_bytes(versions[3]), []), "it is there already"
        assert past.receive(newcomer, 5) == (flat_bytes(versions[5]), [root[3], delta_to(4), delta_to(5)])
        assert past.receive(receiver, 7) == (flat_bytes(versions[7]), [delta_to(n) for n in (4, 5, 6, 7)])
        assert past.receive(newcomer, 1) == (flat_bytes(versions[1]), [root[0], delta_to(1)]), "nothing leads back"
        with a_receiver() as away:
            past.receive(away, 2)
            assert past.receive(away, 7) == (flat_bytes(versions[7]), [root[6], delta_to(7)])


def test_a_corrupt_delta_is_refused_and_the_next_attempt_goes_on_from_the_good_ones_before_it() -> None:
    versions = nudged_versions(4)
    with history(versions, anchor_every=9) as past, a_receiver() as receiver:
        missing = past.blobs[past.delta_to(3)]
        past.blobs[past.delta_to(3)] = missing[:-1] + b"?"
        with pytest.raises(WeightsRefused, match="does not match its hash"):
            past.receive(receiver, 3)
        past.blobs[past.delta_to(3)] = missing
        assert past.receive(receiver, 3) == (flat_bytes(versions[3]), [past.delta_to(3)])


def test_a_delta_that_does_not_lead_to_the_published_bytes_is_refused_and_the_anchor_is_pulled_next() -> None:
    versions = nudged_versions(3)
    entries = entries_of(versions[0])
    with history(versions, anchor_every=9) as past, a_receiver() as receiver:
        past.receive(receiver, 1)
        other = flat_bytes(nudged(versions[1], seed=99))
        wrong = encode_delta(memoryview(flat_bytes(versions[1])), memoryview(other), entries)
        blob = Blob(root=xxhash.xxh3_128_hexdigest(wrong), num_bytes=len(wrong))
        past.blobs[blob.root] = wrong
        right = past.manifests[2]
        last = msgspec.structs.replace(right.deltas[-1], blob=blob)
        past.manifests[2] = msgspec.structs.replace(right, deltas=[right.deltas[0], last])
        with pytest.raises(WeightsRefused, match="version 2: embed does not match its hash"):
            past.receive(receiver, 2)
        past.manifests[2] = right
        travelled = [past.manifests[0].root, past.delta_to(1), past.delta_to(2)]
        assert past.receive(receiver, 2) == (flat_bytes(versions[2]), travelled)


def test_each_blob_of_a_version_can_be_checked_on_its_own() -> None:
    with history(nudged_versions(3), anchor_every=9) as past:
        manifest = past.manifests[2]
        names = [Blob(root=manifest.anchor.root, num_bytes=manifest.num_bytes)]
        names += [delta.blob for delta in manifest.deltas]
        for blob in names:
            data = past.blobs[blob.root]
            check_blob(manifest, blob, memoryview(data))
            with pytest.raises(WeightsError, match="does not match its hash"):
                check_blob(manifest, blob, memoryview(bytes([data[0] ^ 1]) + data[1:]))


def test_broadcast_and_pull_bring_deltas_to_who_has_the_base_and_whole_weights_to_who_has_not(plane: Plane) -> None:
    bulletin = plane.bulletin
    versions = nudged_versions(6)
    near, late = plane.info("near", "broadcast"), plane.info("late", "broadcast")

    def sent() -> Blob:
        """What the last broadcast was of."""
        return bulletin.sealed_group(plane.offer().invitation.number).blob

    def manifest() -> Manifest:
        return plane.offer().manifest

    with plane.publishing(anchor_every=3) as publisher, a_receiver() as far:

        def pulled() -> bytes:
            return bytes(far.receive(plane.offer()).numpy())

        with spawned((receive_all, (near,))) as received:
            wait_until(lambda: bulletin.broadcast_members() == ["near"], "a member, to be invited to version 0")
            for version in (0, 1, 2):
                publish_whole(publisher, versions[version], policy_version=version)
                assert next_of(received, "near") == (version, flat_bytes(versions[version]))
                whole = Blob(root=manifest().root, num_bytes=manifest().num_bytes)
                assert sent() == (whole if version == 0 else manifest().deltas[-1].blob)
            assert pulled() == flat_bytes(versions[2]), "the anchor and two deltas"
            with spawned((receive_all, (late,))) as also_received:
                assert next_of(also_received, "late") == (2, flat_bytes(versions[2])), "pulled: it was not invited"
                publish_whole(publisher, versions[3], policy_version=3)
                assert next_of(received, "near") == (3, flat_bytes(versions[3]))
                assert next_of(also_received, "late") == (3, flat_bytes(versions[3]))
                assert manifest().anchor is None and sent() == manifest().deltas[-1].blob, "an anchor, by delta"
        publish_whole(publisher, versions[4], policy_version=4)
        plane.wait_for(4)
        assert pulled() == flat_bytes(versions[4])
        publish_whole(publisher, weights(5), policy_version=5)  # every element changed
        plane.wait_for(5)
        assert manifest().deltas == [] and manifest().anchor is None
        assert pulled() == flat_bytes(weights(5))
        assert publisher.stats.announced.num_bytes == manifest().num_bytes
