"""Weights on disk: what the publisher leaves there, and what a receiver makes of it."""

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from slipstream.actors.weights.receive import Receiver
from slipstream.actors.weights.refused import WeightsRefused
from slipstream.common.process.config_error import ConfigError
from slipstream.common.transfer.blob_store import StoreError, run_store
from slipstream.common.transfer.chunks import Blob
from slipstream.common.transfer.weights import Manifest, Offer
from slipstream.learner.publisher.store import BlobGone
from slipstream.replay.fleet.bulletin import Bulletin
from tests.full_disk import largest_file
from tests.learner.publisher.test_weight_deltas import nudged_versions
from tests.learner.publisher.test_weights import Plane, flat_bytes, latest_version, receiver_info, weights
from tests.waiting import wait_until


def files(folder: Path, run_id: str) -> set[str]:
    return {file.name for file in (folder / run_id).iterdir()}


def roots(manifest: Manifest) -> set[str]:
    anchor = manifest.anchor.root if manifest.anchor else manifest.root
    return {anchor, *(delta.blob.root for delta in manifest.deltas)}


def a_reader(run_id: str, folder: Path) -> AbstractContextManager[Receiver]:
    return closing(Receiver(receiver_info("redis://unused", run_id, "a", "disk", disk=str(folder))))


def stored(bulletin: Bulletin, version: int) -> Offer:
    """The offer of `version`, once it is on disk."""
    wait_until(lambda: latest_version(bulletin, "stored") == version, f"version {version} on disk")
    return bulletin.latest(board="stored")


def test_a_reader_has_every_version_from_disk_alone_and_old_blobs_go(plane: Plane) -> None:
    bulletin, disk, versions = plane.bulletin, plane.folder / "disk", nudged_versions(6)
    with (
        plane.publishing(anchor_every=2, disk=f"file://{disk}") as publisher,
        a_reader(plane.run_id, disk) as reader,
        a_reader(plane.run_id, disk) as newcomer,
    ):
        before: set[str] = set()
        for version, tensors in enumerate(versions):
            publisher.publish(tensors, policy_version=version)
            offer = stored(bulletin, version)
            assert bytes(reader.receive(offer).numpy()) == flat_bytes(tensors)
            here = roots(offer.manifest)
            wait_until(lambda expected=here | before: files(disk, plane.run_id) == expected, "older blobs to go")
            before = here
        assert offer.manifest.anchor is not None and len(offer.manifest.deltas) == 3
        assert bytes(newcomer.receive(offer).numpy()) == flat_bytes(versions[-1])


def test_what_an_ended_publisher_left_on_disk_goes_and_its_version_is_there_again(plane: Plane) -> None:
    bulletin, disk = plane.bulletin, plane.folder / "disk"
    (disk / plane.run_id).mkdir(parents=True)
    (disk / plane.run_id / ("0" * 32)).write_bytes(b"half a blob")
    with plane.publishing(disk=str(disk)) as publisher, a_reader(plane.run_id, disk) as reader:
        publisher.publish(weights(1), policy_version=1)
        manifest = stored(bulletin, 1).manifest
        wait_until(lambda: files(disk, plane.run_id) == {manifest.root}, "what was left there to go")
        (disk / plane.run_id / manifest.root).write_bytes(b"truncated")
        with pytest.raises(WeightsRefused, match="is incomplete: it has 9 of"):
            reader.receive(stored(bulletin, 1))
        (disk / plane.run_id / manifest.root).write_bytes(bytes(manifest.num_bytes))
        with pytest.raises(WeightsRefused, match="embed does not match its hash"):
            reader.receive(stored(bulletin, 1))
        os.kill(publisher.pid, signal.SIGKILL)
        wait_until(lambda: publisher.stats.num_restarts == 1, "the death to be noticed")

        def readable() -> bool:
            return (disk / plane.run_id / manifest.root).read_bytes() == flat_bytes(weights(1))

        wait_until(readable, "version 1 again")
        assert bytes(reader.receive(stored(bulletin, 1)).numpy()) == flat_bytes(weights(1))


def test_what_is_no_blob_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("precious")
    store = run_store(str(tmp_path), "run")
    old, new = (Blob(root=digit * 32, num_bytes=1) for digit in "0f")
    for blob in (old, new):
        store.write(blob, [b"x"])
    store.keep({new.root})
    assert files(tmp_path, "run") == {"checkpoints", "metrics.jsonl", new.root}


def test_a_disk_that_cannot_be_written_blocks_nothing_and_is_tried_again(plane: Plane) -> None:
    bulletin, disk = plane.bulletin, plane.folder / "disk"
    disk.write_text("a file, not a folder")
    with plane.publishing(disk=str(disk)) as publisher:
        for version in (1, 2):
            publisher.publish(weights(version), policy_version=version)
            plane.wait_for(version)
        wait_until(
            lambda: "could not write version" in (plane.folder / "publisher.log").read_text(), "the failure in the log"
        )
        assert bulletin.latest(board="stored") is None
        disk.unlink()
        assert stored(bulletin, 2).manifest == bulletin.latest().manifest  # type: ignore[union-attr]


def test_a_blob_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = run_store(str(tmp_path), "run")
    with pytest.raises(StoreError, match="run/missing"):
        store.read(Blob(root="missing", num_bytes=1), memoryview(bytearray(1)))


class Refusing(MemoryFileSystem):
    """A kind of store whose errors are its own, as S3's are."""

    protocol = "refusing"

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        raise RuntimeError("SlowDown")

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        raise RuntimeError("SlowDown")


def test_whatever_a_kind_of_store_raises_is_an_error_of_the_store() -> None:
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    store, blob = run_store("refusing://bucket", "run"), Blob(root="0" * 32, num_bytes=1)
    for ask in (
        lambda: store.write(blob, [b"x"]),
        lambda: store.read(blob, memoryview(bytearray(1))),
        lambda: store.keep(set()),
    ):
        with pytest.raises(StoreError, match="RuntimeError: SlowDown"):
            ask()


@pytest.mark.parametrize("raises", [BlobGone, StoreError])
def test_of_a_blob_that_could_not_be_written_whole_no_part_stays(tmp_path: Path, raises: type[Exception]) -> None:
    """Otherwise a store that is slower than the learner, or full, would take one more part with each version."""

    def chunks() -> Iterator[bytes]:
        yield b"x" * 1000
        raise raises("a newer one is served, or there is no room")

    store = run_store(str(tmp_path), "run")
    for version in range(3):
        with pytest.raises(raises):
            store.write(Blob(root=f"{version:032x}", num_bytes=2000), chunks())
    assert files(tmp_path, "run") == set()


def test_a_full_disk_keeps_no_part_of_a_blob(tmp_path: Path) -> None:
    store = run_store(str(tmp_path), "run")
    with largest_file(bytes_allowed=1 << 16), pytest.raises(StoreError, match="File too large"):
        store.write(Blob(root="0" * 32, num_bytes=1 << 20), [bytes(1 << 14)] * 64)
    assert files(tmp_path, "run") == set()


def test_a_url_that_nothing_here_can_reach_is_refused_by_the_learner(plane: Plane) -> None:
    with (
        pytest.raises(ConfigError, match=r"`weights\.disk` nosuch://bucket"),
        plane.publishing(disk="nosuch://bucket"),
    ):
        pass
