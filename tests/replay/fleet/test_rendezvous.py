"""How the members of a broadcast group find each other: through Redis, by values that only they can have written."""

from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import redis
import torch
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo

from slipstream.learner.publisher.broadcast_sender import GroupStore
from slipstream.replay.fleet.rendezvous import MAC_BYTES, Rendezvous, RendezvousFailed
from slipstream.replay.records import keys
from slipstream.tools.lab.bench.weights_stage import publish_whole
from tests.garbage import garbage, shout, shouts
from tests.learner.publisher.test_weight_faults import following, reached
from tests.learner.publisher.test_weights import Plane, flat_bytes, weights
from tests.waiting import wait_until

PEER = "0/1"  # where rank 0 of two looks for the address of the other


def name_of(run_id: str, number: int = 1) -> str:
    return keys.key(run_id, "weights", "rendezvous", number)


def rendezvous(client: redis.Redis, run_id: str, *, number: int = 1, secret: bytes = b"s3cret") -> Rendezvous:
    return Rendezvous(client, name_of(run_id, number), secret=secret, timeout_s=0.1)


def join(client: redis.Redis, run_id: str) -> None:
    """As rank 0 of a group of two, as the publisher does."""
    store = GroupStore(client, name_of(run_id), secret=b"s3cret", timeout_s=0.2)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=0.2)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = ProcessGroup(store, 0, 2)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, ProcessGroupGloo(store, 0, 2, options))


def test_what_one_member_says_another_hears(redis_client: redis.Redis, run_id: str) -> None:
    mine, theirs = rendezvous(redis_client, run_id), rendezvous(redis_client, run_id)
    mine.set("a", b"\x00\xff")
    assert theirs.get("a") == b"\x00\xff"
    assert theirs.check(["a"]) and not theirs.check(["a", "b"])
    assert (mine.add("n", 2), theirs.add("n", 3)) == (2, 5)
    assert redis_client.ttl(name_of(run_id)) > 0, "the values of a group expire"
    assert theirs.delete_key("a") and not mine.check(["a"])
    with pytest.raises(RendezvousFailed, match=r"no value for b in 0\.1 s"):
        mine.get("b")


def test_a_value_counts_only_as_written_for_its_group_key_and_secret(redis_client: redis.Redis, run_id: str) -> None:
    mine = rendezvous(redis_client, run_id)
    mine.set(PEER, b"an address")
    written = redis_client.hget(name_of(run_id), PEER)
    assert isinstance(written, bytes)
    rendezvous(redis_client, run_id, secret=b"other").set("forged", b"an address")
    rendezvous(redis_client, run_id, number=2).set(PEER, b"an address")
    of_another_group = redis_client.hget(name_of(run_id, 2), PEER)
    for number, value in enumerate([written, of_another_group, written[:MAC_BYTES], *garbage(1, 100, sound=[written])]):
        if number or value != written:
            redis_client.hset(name_of(run_id), f"other{number}", value)  # under another key, or what is no value at all
    for field in redis_client.hgetall(name_of(run_id)):
        assert isinstance(field, bytes)
        if field.decode() != PEER:
            with pytest.raises(RendezvousFailed, match="have a wrong MAC: another process wrote them"):
                mine.get(field.decode())
    assert mine.get(PEER) == b"an address"


def test_a_missing_or_garbled_address_breaks_the_group_not_the_process(redis_client: redis.Redis, run_id: str) -> None:
    with pytest.raises(RuntimeError, match=r"no value for 0/1 in 0\.2 s"):
        join(redis_client, run_id)
    for value in (b"", b"x", b"\xff" * 178, bytes(5000)):
        redis_client.delete(name_of(run_id))
        redis_client.hset(name_of(run_id), PEER, value)
        with pytest.raises(RuntimeError, match="have a wrong MAC"):
            join(redis_client, run_id)
    redis_client.delete(name_of(run_id))
    redis_client.lpush(name_of(run_id), "x")
    with pytest.raises(RuntimeError, match=r"Redis: .*WRONGTYPE"):
        join(redis_client, run_id)


def test_a_publisher_listens_on_its_host_alone_and_outlives_forged_keys_and_garbage_on_every_port(plane: Plane) -> None:
    with plane.publishing(broadcast_timeout_s=3.0) as publisher, following(plane.info("a", "broadcast")) as received:

        def arrives(version: int) -> None:
            publish_whole(publisher, weights(version), policy_version=version)
            reached(received, version, flat_bytes(weights(version)))

        pid = publisher._process.pid
        wait_until(lambda: plane.bulletin.broadcast_members() == ["a"], "the member")
        arrives(1)
        wait_until(lambda: publisher.stats.num_broadcasts == 1, "a broadcast")
        found = psutil.Process(pid).net_connections(kind="inet")
        listening = [(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN]
        assert listening and {host for host, _ in listening} == {"127.0.0.1"}
        for host, port in listening:
            for data in shouts(port):
                shout(host, port, data)
        for number in range(2, 20):
            plane.client.hset(name_of(plane.run_id, number), mapping={f"0/{rank}": b"" for rank in range(4)})
        arrives(2)
        arrives(3)
        assert publisher._process.pid == pid


def test_no_process_of_ours_opens_a_store_that_listens_everywhere() -> None:
    root = Path(__file__).parents[3]
    rooms = ("actors", "common", "envhub", "learner", "replay", "tools")
    naming = [path.name for room in rooms for path in (root / room).rglob("*.py") if "TCPStore(" in path.read_text()]
    assert naming == []
