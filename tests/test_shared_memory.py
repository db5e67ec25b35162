"""Received weights in memory that other processes map: the same bytes, one copy, and nothing left behind."""

import subprocess
import sys
from pathlib import Path

import pytest
import redis

from actors.receive import Receiver
from actors.shared_memory import SharedMemory, map_shared
from common.weights import deltas_from
from replay.bulletin import Bulletin
from tests.test_weight_deltas import nudged
from tests.test_weights import flat_bytes, latest_version, publishing, receiver_info, wait_until, weights

READER = """
import sys
from actors.shared_memory import map_shared
view = map_shared(sys.argv[1])
print(bytes(view.numpy()).hex())
view += 1
"""


def test_another_process_maps_the_bytes_and_cannot_change_them() -> None:
    memory = SharedMemory(5)
    memory.buffer.copy_(map_shared(memory.path) + 7)
    command = [sys.executable, "-c", READER, memory.path]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0707070707\n"
    assert memory.buffer.tolist() == [7] * 5


def test_memory_that_no_process_needs_is_freed_and_a_view_outlives_its_owner() -> None:
    memory = SharedMemory(3)
    view, path = map_shared(memory.path), Path(memory.path)
    memory.buffer.fill_(9)
    del memory
    assert not path.exists()
    assert view.tolist() == [9] * 3
    assert map_shared(SharedMemory(0).path).tolist() == []


@pytest.mark.parametrize("anchor_every", [1, 10])
def test_what_a_receiver_pulls_whole_or_as_deltas_is_what_others_map(
    anchor_every: int, redis_url: str, redis_client: redis.Redis, run_id: str, tmp_path: Path
) -> None:
    bulletin, tensors = Bulletin(redis_client, run_id), weights(1)
    receiver = Receiver(receiver_info(redis_url, run_id, "a", "pull"), shared=True)
    with publishing(redis_url, run_id, tmp_path, anchor_every=anchor_every) as publisher:
        for version in (1, 2, 3):
            publisher.publish(tensors, policy_version=version)
            wait_until(lambda expected=version: latest_version(bulletin) == expected, f"version {version}")
            offer = bulletin.latest()
            assert offer is not None
            received = receiver.receive(offer)
            assert bytes(received.numpy()) == flat_bytes(tensors)
            assert bytes(map_shared(receiver.shared_path).numpy()) == flat_bytes(tensors)
            tensors = nudged(tensors, seed=version)
        assert (deltas_from(offer.manifest, offer.manifest.root) == []) and bool(offer.manifest.deltas) == (
            anchor_every > 1
        )
    receiver.close()
