"""Relays with real processes: what the publisher is spared, and what becomes of the others when one fails."""

import json
import math
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import xxhash
import zmq
from rich.console import Console

from slipstream.actors.host.model_cache import cached_folder
from slipstream.actors.host.relay import Relay, RelayInfo
from slipstream.actors.weights.pull import actors_puller
from slipstream.common.config.config import dump_config, load_config
from slipstream.common.process.connection import connect
from slipstream.common.transfer.chunk_server import ChunkServer, ServerLimits
from slipstream.common.transfer.chunks import Blob, ChunkRequest
from slipstream.common.transfer.encryption import KEY_VARIABLE, CurveKey
from slipstream.common.transfer.model_folder import ModelFile
from slipstream.common.transfer.weights import Manifest, Offer, buffer_bytes, layout, sealed
from slipstream.replay.fleet.bulletin import Bulletin, RelayNotice
from slipstream.replay.fleet.fleet import Fleet, RunState
from slipstream.tools.cli.cli import main
from slipstream.tools.lab.loopback_server import start_server
from slipstream.tools.run.actor_host import host_relay
from slipstream.tools.see.fleet_tables import relays_table
from tests.actors.chunks import relay_at
from tests.link import Link
from tests.processes import Process
from tests.replay.buffer.every_verb import FACTS
from tests.waiting import wait_until

CHUNK_BYTES = 64 << 10
NUM_CHUNKS = 48
NUM_BYTES = NUM_CHUNKS * CHUNK_BYTES
SLOWLY = 16 * CHUNK_BYTES  # bytes a second, to all together: a blob takes 3 s
LIMITS = ServerLimits(chunk_bytes=CHUNK_BYTES)


class Origin:
    """A publisher in this process, so that what it serves can be counted; each version is one blob."""

    def __init__(self, bulletin: Bulletin, *, bytes_per_s: float = math.inf, key: CurveKey | None = None) -> None:
        self._bulletin = bulletin
        self._data: dict[str, bytes] = {}
        self._bytes_per_s = bytes_per_s
        self.server = ChunkServer("127.0.0.1", self._read, limits=LIMITS, key=key)
        self.endpoint = self.server.endpoint

    def publish(self, version: int) -> Manifest:
        data = random.Random(version).randbytes(NUM_BYTES)
        entries = layout([("w", "float16", (NUM_BYTES // 2,))])
        assert buffer_bytes(entries) == NUM_BYTES
        manifest = sealed(entries, memoryview(data), policy_version=version, learner_epoch=0)
        self._data[manifest.root] = data
        self._bulletin.announce(Offer(manifest=manifest, pull_endpoint=self.endpoint))
        return manifest

    def offer(self, root: str, data: bytes) -> None:
        """Serve a blob that is no version."""
        self._data[root] = data

    def data(self, manifest: Manifest) -> bytes:
        return self._data[manifest.root]

    def digests(self, manifest: Manifest) -> dict[str, str]:
        """What a receiver of it says."""
        return {manifest.root: xxhash.xxh3_128_hexdigest(self.data(manifest))}

    def _read(self, request: ChunkRequest) -> bytes | None:
        time.sleep(request.num_bytes / self._bytes_per_s)
        data = self._data.get(request.root)
        return None if data is None else data[request.offset : request.offset + request.num_bytes]


class Plane:
    """The weight plane of one run: its relays and receivers, each a process."""

    def __init__(self, redis_url: str, run_id: str, client: redis.Redis, tmp_path: Path) -> None:
        self.bulletin, self.fleet = Bulletin(client, run_id), Fleet(client, run_id)
        self._redis_url, self._run_id, self._tmp_path = redis_url, run_id, tmp_path
        self._processes: list[Process] = []
        config_yaml = f"run: {{name: {run_id}}}\n"
        self.fleet.describe_run(msgspec.structs.replace(FACTS, config_yaml=config_yaml, model_path=""))
        self.fleet.set_run_state(RunState.TRAINING)

    def close(self) -> None:
        for process in self._processes:
            if process.exit_code is None:
                process.kill()

    def start_relay(self, *settings: str, bytes_per_s: float = math.inf) -> Process:
        run = [f"redis.url={self._redis_url}", f"run.name={self._run_id}"]
        arguments = ["tests.actors.small_chunks", str(CHUNK_BYTES), str(bytes_per_s), *run, *settings]
        return self._start(f"relay{len(self._processes)}", arguments)

    def start_receivers(self, *names: str, **environment: str) -> "list[Receiving]":
        arguments = ["tests.actors.puller", self._redis_url, self._run_id, str(CHUNK_BYTES), *names]
        process = self._start(names[0], arguments, **environment)
        return [Receiving(process, name) for name in names]

    def relay(self) -> RelayNotice | None:
        """What the only relay says of itself; None while there is none."""
        relays = self.bulletin.relays()
        assert len(relays) < 2
        return relays[0] if relays else None

    def wait_for_relays(self, count: int = 1) -> None:
        wait_until(lambda: len(self.bulletin.relays()) == count, f"{count} relays")

    def _start(self, name: str, arguments: list[str], **environment: str) -> Process:
        log = self._tmp_path / f"{name}.log"
        process = Process(name, [sys.executable, "-m", *arguments], log=log, environment=environment)
        self._processes.append(process)
        return process


class Receiving:
    """A receiver, in a process of tests/actors/puller.py that may have others, and its output."""

    def __init__(self, process: Process, name: str) -> None:
        self.process, self._name = process, name

    def said(self) -> list[dict[str, Any]]:
        lines, begin = self.process.said().splitlines(), json.dumps({"name": self._name})[:-1]
        return [json.loads(line) for line in lines if line.startswith(begin) and line.endswith("}")]

    def last(self, version: int) -> dict[str, Any] | None:
        """Its output when it had `version`."""
        return next((said for said in self.said() if said.get("version") == version), None)

    def wait_for(self, version: int) -> dict[str, Any]:
        return wait_until(lambda: self.last(version), f"{self._name} to have version {version}")


@pytest.fixture
def plane(redis_url: str, run_id: str, redis_client: redis.Redis, tmp_path: Path) -> Iterator[Plane]:
    with closing(Plane(redis_url, run_id, redis_client, tmp_path)) as made:
        yield made


@contextmanager
def origin_of(plane: Plane, **settings: Any) -> Iterator[Origin]:
    origin = Origin(plane.bulletin, **settings)
    with closing(origin.server):
        yield origin


def relay_here(redis_url: str, run_id: str, *, timeout_s: float = 30.0) -> Relay:
    named = {"redis_url": redis_url, "run_id": run_id, "name": "r", "host": "h", "address": "127.0.0.1"}
    return Relay(RelayInfo(**named, limits=LIMITS, timeout_s=timeout_s), key=None)


def served_by(relay: RelayNotice | None) -> int:
    return relay.served_bytes if relay else 0


def test_eight_receivers_of_one_relay_cost_the_publisher_one_copy_and_a_late_one_nothing(plane: Plane) -> None:
    plane.start_relay()
    receivers = plane.start_receivers(*(f"r{number}" for number in range(8)))
    plane.wait_for_relays()
    wait_until(lambda: all(receiver.said() for receiver in receivers), "the receivers")
    with origin_of(plane) as origin:
        for version in (1, 2):
            manifest = origin.publish(version)
            for receiver in receivers:
                said = receiver.wait_for(version)
                assert (said["digests"], said["fetched_bytes"]) == (origin.digests(manifest), version * NUM_BYTES)
            assert origin.server.load.served_bytes == version * NUM_BYTES, "the publisher served more than one copy"
    # And now the learner is dead: there is the offer in Redis, and the relay.
    said = plane.start_receivers("late")[0].wait_for(2)
    assert said["digests"] == origin.digests(manifest)
    wait_until(lambda: served_by(plane.relay()) == 17 * NUM_BYTES, "the relay's notice")


def test_the_children_of_a_relay_that_is_killed_in_mid_blob_go_on_from_another(plane: Plane) -> None:
    relay = plane.start_relay(bytes_per_s=2 * SLOWLY)
    plane.wait_for_relays()
    with origin_of(plane) as origin:
        manifest = origin.publish(1)
        receivers = plane.start_receivers("r0", "r1")
        wait_until(lambda: served_by(plane.relay()) > 0, "the relay to serve")
        relay.kill()
        for receiver in receivers:
            said = receiver.wait_for(1)
            assert said["digests"] == origin.digests(manifest)
            assert said["fetched_bytes"] == NUM_BYTES, "what had come was fetched again"
        from_relay = 3 * NUM_BYTES - origin.server.load.served_bytes
        assert 0 < from_relay < 2 * NUM_BYTES, "the relay was killed before it served, or after"


def test_a_receiver_that_is_stopped_in_mid_pull_does_not_hold_up_the_others(plane: Plane) -> None:
    with origin_of(plane, bytes_per_s=SLOWLY) as origin:
        (stopped,) = plane.start_receivers("stopped")
        others = plane.start_receivers("r0", "r1")
        wait_until(lambda: all(receiver.said() for receiver in [stopped, *others]), "the receivers")
        manifest = origin.publish(1)
        wait_until(lambda: origin.server.load.served_bytes > 6 * CHUNK_BYTES, "the pulls to be under way")
        stopped.process.send(signal.SIGSTOP)
        for receiver in others:
            assert receiver.wait_for(1)["digests"] == origin.digests(manifest)
        assert stopped.last(1) is None
        stopped.process.send(signal.SIGCONT)
        assert stopped.wait_for(1)["digests"] == origin.digests(manifest)


def test_a_relay_with_bad_bytes_is_refused_counted_and_the_others_are_fine(plane: Plane) -> None:
    liar = ChunkServer("127.0.0.1", lambda request: bytes(request.num_bytes), limits=LIMITS, key=None)
    with origin_of(plane) as origin, closing(liar):
        manifest = origin.publish(1)
        plane.bulletin.announce_relay(relay_at(liar.endpoint, name="liar", roots=[manifest.root]), ttl_s=600)
        plane.start_relay()
        plane.wait_for_relays(2)
        receivers = plane.start_receivers("r0", "r1")
        for receiver in receivers:
            assert receiver.wait_for(1)["digests"] == origin.digests(manifest)
        good = next(relay for relay in plane.bulletin.relays() if relay.name != "liar")
        assert good.roots == [manifest.root] and good.num_corrupt == 1, "the relay did not meet the liar"
        num_refused = 1 + sum(receiver.last(1)["num_corrupt"] for receiver in receivers)  # type: ignore[index]
        assert plane.bulletin.blamed() == {liar.endpoint: num_refused}
        assert liar.load.served_bytes == num_refused * NUM_BYTES


def test_a_relay_that_is_cut_off_from_the_publisher_keeps_the_old_weights_and_heals(plane: Plane) -> None:
    with origin_of(plane, bytes_per_s=SLOWLY) as origin, Link(int(origin.endpoint.rpartition(":")[2])) as link:
        origin.endpoint = f"tcp://127.0.0.1:{link.port}"
        plane.start_relay()
        plane.wait_for_relays()
        (receiver,) = plane.start_receivers("r")
        first = origin.publish(1)
        receiver.wait_for(1)
        second = origin.publish(2)
        wait_until(lambda: origin.server.load.served_bytes > NUM_BYTES + 8 * CHUNK_BYTES, "version 2 to be under way")
        link.is_cut = True
        wait_until(lambda: any("refused" in said for said in receiver.said()), "version 2 to be given up")
        relay = plane.relay()
        assert relay is not None and relay.policy_version == 1 and relay.roots == [first.root]
        assert receiver.last(2) is None
        link.is_cut = False
        assert receiver.wait_for(2)["digests"] == origin.digests(second)
        wait_until(lambda: (relay := plane.relay()) is not None and relay.policy_version == 2, "the relay to heal")
        assert link.num_held > 0, "the link was never cut"


def test_with_a_key_the_publisher_and_a_relay_serve_who_has_it_and_nobody_else(
    plane: Plane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file = tmp_path / "keys" / "weights.key"
    assert main(["access", "key", f"weights.key_file={key_file}"]) == 0
    secret = key_file.read_text().strip()
    assert secret not in capsys.readouterr().out and key_file.stat().st_mode & 0o777 == 0o600
    assert main(["access", "key", f"weights.key_file={key_file}"]) == 2, "a key in use was overwritten"
    assert key_file.read_text().strip() == secret

    key = CurveKey(public=zmq.curve_public(secret.encode()), secret=secret.encode())
    plane.start_relay(f"weights.key_file={key_file}")
    plane.wait_for_relays()
    with origin_of(plane, key=key) as origin:
        manifest = origin.publish(1)
        (member,) = plane.start_receivers("member", **{KEY_VARIABLE: secret})
        (stranger,) = plane.start_receivers("stranger")
        assert member.wait_for(1)["digests"] == origin.digests(manifest)
        wait_until(lambda: any("refused" in said for said in stranger.said()), "the stranger to give up")
        assert stranger.last(1) is None
        wait_until(lambda: served_by(plane.relay()) == NUM_BYTES, "the relay's notice")
        assert origin.server.load.served_bytes == NUM_BYTES


def test_a_relay_whose_memory_has_changed_mends_itself_when_blamed(plane: Plane, redis_url: str, run_id: str) -> None:
    with closing(relay_here(redis_url, run_id)) as relay, origin_of(plane) as origin:
        manifest = origin.publish(1)
        wait_until(lambda: (notice := plane.relay()) is not None and notice.policy_version == 1, "version 1")
        held = relay._holdings.get(manifest.root)
        held[NUM_BYTES // 2] ^= 1
        said = plane.start_receivers("r0")[0].wait_for(1)
        assert said["digests"] == origin.digests(manifest) and said["num_corrupt"] == 1
        wait_until(lambda: (now := relay._holdings.get(manifest.root)) is not None and now is not held, "another copy")
        assert bytes(relay._holdings.get(manifest.root).data) == origin.data(manifest)  # type: ignore[union-attr]
        assert plane.bulletin.blamed() == {relay.endpoint: 1}
    assert plane.relay() is None


def test_a_relay_keeps_the_files_of_the_model_for_hosts_that_come_while_the_publisher_is_gone(
    plane: Plane, redis_url: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights come first: one of the files is not served, and keeps nothing else back."""
    config, template = b"{}", b"{{ messages }}"
    files = [
        ModelFile(name=name, blob=Blob(root=xxhash.xxh3_128_hexdigest(data), num_bytes=len(data)))
        for name, data in (("config.json", config), ("chat_template.jinja", template), ("gone.json", b"gone"))
    ]
    plane.fleet.describe_run(msgspec.structs.replace(plane.fleet.run_facts(), model_files=files))
    plane.start_relay()
    plane.wait_for_relays()
    with origin_of(plane) as origin:
        for file, data in zip(files, (config, template), strict=False):
            origin.offer(file.blob.root, data)
        manifest = origin.publish(1)
        roots = {manifest.root, files[0].blob.root, files[1].blob.root}
        wait_until(lambda: (notice := plane.relay()) is not None and set(notice.roots) == roots, "all but the one")
        gone = Offer(manifest=manifest, pull_endpoint=origin.endpoint)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    puller = partial(actors_puller, redis_url, run_id, actor="a", chunk_bytes=CHUNK_BYTES)
    folder = cached_folder(files[:2], make_puller=puller, newest=lambda: gone, timeout_s=60.0)
    assert (folder / "config.json").read_bytes() == config
    assert (folder / "chat_template.jinja").read_bytes() == template


def test_a_relay_leaves_when_it_is_told_to_and_when_its_run_is_over(plane: Plane) -> None:
    told, left = plane.start_relay(), plane.start_relay()
    plane.wait_for_relays(2)
    told.send(signal.SIGTERM)
    assert told.wait() == 75
    assert len(plane.bulletin.relays()) == 1
    plane.fleet.set_run_state(RunState.FINISHED)
    assert left.wait() == 0
    assert plane.bulletin.relays() == []


def test_a_relay_outlives_a_server_whose_memory_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start_server(tmp_path) as server, connect(server.admin_url) as client:
        bulletin = Bulletin(client, "full")
        with closing(relay_here(server.secret_url, "full", timeout_s=5.0)) as relay:
            wait_until(lambda: len(bulletin.relays()) == 1, "the relay")
            client.config_set("maxmemory", 1)
            wait_until(lambda: "Redis refused a call of this relay" in caplog.text, "the refusal to be logged")
            wait_until(lambda: bulletin.relays() == [], "its notice to be gone")
            assert relay.alive
            client.config_set("maxmemory", 0)
            wait_until(lambda: len(bulletin.relays()) == 1, "the relay to be there again")


def test_an_actor_host_keeps_its_own_relay_up(
    plane: Plane, redis_url: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.tools.run.child.BACK_OFF_S", (0.0,) * 5)
    named = [f"run.root={tmp_path}", f"run.name={run_id}", f"redis.url={redis_url}"]
    config = load_config(None, [*named, "actors.transport=relay"])
    settings = tmp_path / "settings.yaml"
    settings.write_text(dump_config(config))
    with host_relay(config, settings) as child:
        assert child is not None
        plane.wait_for_relays()
        first = plane.relay()
        console = Console(width=200)
        with console.capture() as shown:
            console.print(relays_table(plane.bulletin.relays()))
        assert first is not None and first.endpoint in shown.get() and "0 of 8" in shown.get()
        child.send(signal.SIGKILL)

        def another() -> bool:
            assert child.keep_up()
            return any(relay.name != first.name for relay in plane.bulletin.relays())

        wait_until(another, "the relay that takes its place")
    wait_until(lambda: plane.relay() is None, "both to be gone")
    with host_relay(load_config(None, []), settings) as child:
        assert child is None
