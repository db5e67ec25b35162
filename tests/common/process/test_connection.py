"""The forms of `redis.url`: every verb works over each of them, and passwords stay where they belong."""

import itertools
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import redis

from slipstream.common.process.connection import (
    PASSWORD_FILE_VARIABLE,
    PASSWORD_VARIABLE,
    RedisUnreachable,
    connect,
    connect_or_explain,
    own_address,
    without_password,
)
from slipstream.replay.records.keys import key
from slipstream.replay.server.redis_server import Server
from slipstream.tools.cli.cli import main
from tests.replay.buffer.every_verb import play_every_verb
from tests.replay.records.attempts import Views, make_buffer, ticket
from tests.replay.server.redis_nodes import Node, certificate, cluster, replicated, tls_in_front_of
from tests.waiting import wait_until


def play(url: str, run_id: str) -> None:
    with connect_or_explain(url) as client:
        play_every_verb(run_id, learner=client, actor=client, viewer=client)


def test_every_verb_works_over_a_socket_file(tmp_path: Path, run_id: str) -> None:
    node = Node(tmp_path, f"unixsocket {tmp_path}/redis.sock")
    try:
        play(f"unix://{tmp_path}/redis.sock", run_id)
    finally:
        node.kill()


def test_every_verb_works_over_tls_and_a_stranger_is_refused(redis_server: Server, tmp_path: Path, run_id: str) -> None:
    """The bundled server has no TLS: a proxy in front of it speaks it."""
    ours, key = certificate(tmp_path)
    with tls_in_front_of(redis_server.port, ours, key) as port:
        address = f"rediss://:{redis_server.password}@127.0.0.1:{port}"
        play(f"{address}?ssl_ca_certs={ours}", run_id)
        with pytest.raises(RedisUnreachable, match="certificate verify failed"):
            connect_or_explain(address)
    other = tmp_path / "other"
    other.mkdir()
    with (
        tls_in_front_of(redis_server.port, *certificate(other, address="127.0.0.2")) as port,
        pytest.raises(RedisUnreachable, match=r"certificate is not valid for '127.0.0.1'"),
    ):
        connect_or_explain(f"rediss://127.0.0.1:{port}?ssl_ca_certs={other}/certificate.pem")


@pytest.mark.parametrize("verb", [["up"], ["top"], ["replay", "audit"]])
def test_an_option_of_a_url_that_redis_py_lacks_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "none")  # `main` moves the password of the URL there, and changes the path
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main([*verb, "redis.url=redis://:secret@h:1?x=y", f"run.root={tmp_path}/runs"]) == 2
    message = capsys.readouterr().err
    assert "has a wrong option after `?`: " in message and "'x'; remove it" in message and "secret" not in message


def test_every_verb_works_on_a_cluster_and_waits_for_a_node_that_died(tmp_path: Path, run_id: str) -> None:
    with cluster(tmp_path) as nodes:
        url = f"redis+cluster://127.0.0.1:1,{nodes[0].address},{nodes[1].address}"  # the first is not there
        for name in (f"{run_id}-{number}" for number in range(4)):  # in slots of their own
            play(url, name)
        assert sum(node.call("DBSIZE") != 0 for node in nodes) > 1
        with connect(url) as client:
            client.set(f"{{{run_id}}}:kept", "yes")
            home = next(node for node in nodes if has(node, run_id))
            home.kill()
            home.start()
            assert client.get(f"{{{run_id}}}:kept") == b"yes"
        play(url, f"{run_id}-again")


def test_every_verb_waits_while_the_slot_of_its_run_moves_to_another_node(tmp_path: Path, run_id: str) -> None:
    """As a cluster is resharded: a verb that ran where the run has not arrived yet would find an empty buffer."""
    with cluster(tmp_path) as nodes, connect(f"redis+cluster://{nodes[0].address}") as client:
        buffer, is_moved = make_buffer(client, run_id), threading.Event()
        with ThreadPoolExecutor(1) as thread:
            training = thread.submit(train_until, is_moved, buffer, run_id)
            wait_until(lambda: buffer.ledger.trained > 0)
            move_slot(nodes, key(run_id, "train"))
            is_moved.set()
            num_groups = training.result(60)
        ledger = buffer.ledger
        assert (ledger.opened, ledger.trained, ledger.inserted) == (num_groups, num_groups, 2 * num_groups)
        assert ledger.expired_leases == 0 and buffer.audit() == []


def train_until(ends: threading.Event, buffer: Views, run_id: str) -> int:
    """Play and train one group after the other, the last after `ends` is set; return how many."""
    buffer.learner.acquire_epoch()
    for group_id in itertools.count():
        is_last = ends.is_set()
        lease = buffer.begin(ticket(group_id))
        assert buffer.actor.heartbeat("a", [lease]) == {group_id}
        buffer.insert(lease)
        assert len(buffer.learner.claim(group_id, 1, policy_version=0, max_lag=0)) == 1
        assert buffer.learner.settle(group_id) == 1
        if is_last:
            return group_id + 1
    raise AssertionError


def move_slot(nodes: list[Node], name: str) -> None:
    """What `redis-cli --cluster reshard` does, key by key, and slowly."""
    slot = str(nodes[0].call("CLUSTER", "KEYSLOT", name))
    source = next(node for node in nodes if node.call("CLUSTER", "COUNTKEYSINSLOT", slot))
    target = next(node for node in nodes if node is not source)
    source_id, target_id = (str(node.call("CLUSTER", "MYID"), "ascii") for node in (source, target))
    target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    time.sleep(1)
    while keys := source.call("CLUSTER", "GETKEYSINSLOT", slot, "100"):
        for each in keys:
            source.call("MIGRATE", "127.0.0.1", str(target.port), each.decode(), "0", "5000")
            time.sleep(0.1)
    for node in (target, *nodes):
        node.call("CLUSTER", "SETSLOT", slot, "NODE", target_id)


def has(node: Node, run_id: str) -> bool:
    try:
        return bool(node.call("EXISTS", f"{{{run_id}}}:kept"))
    except redis.exceptions.MovedError:
        return False


def test_every_verb_works_behind_a_sentinel_and_on_the_replica_that_it_promotes(tmp_path: Path, run_id: str) -> None:
    with replicated(tmp_path) as (master, replica, sentinel):
        url = f"redis+sentinel://127.0.0.1:1,{sentinel.address}/shop"
        play(url, run_id)
        with connect(url) as client:
            client.set("kept", "yes")
            client.wait(1, 10_000)
            master.kill()
            assert client.get("kept") == b"yes"
            client.set("written", "yes")
        assert replica.call("GET", "written") == b"yes"
        play(url, f"{run_id}-again")


def test_auto_is_the_address_by_which_this_machine_reaches_redis() -> None:
    nics = psutil.net_if_addrs().values()
    for address in [each.address for nic in nics for each in nic if each.family is socket.AF_INET]:
        for form in ("redis://me:x@{}:1/1", "redis+sentinel://me@{}:1,10.0.0.9:1/shop", "redis+cluster://{}:1,b:2"):
            assert own_address("auto", form.format(address)) == address
    for url in ("", "unix:///run/redis.sock", "redis://localhost"):
        assert (own_address("auto", url), own_address("10.0.0.1", url)) == ("127.0.0.1", "10.0.0.1")


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel"])
def test_a_user_name_may_hold_any_character(scheme: str) -> None:
    with connect(f"{scheme}://us%40er:pass%2Fword@127.0.0.1:1/0") as client:
        assert client.connection_pool.connection_kwargs["username"] == "us@er"
        assert client.connection_pool.connection_kwargs["password"] == "pass/word"


def test_a_password_may_come_from_a_file(redis_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    file.write_text(f"{redis_server.password}\n")
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(file))
    with connect_or_explain(redis_server.url) as client:
        assert client.ping()
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(RedisUnreachable, match=r"PASSWORD_FILE cannot be read: .*nowhere'; set it to a file"):
        connect_or_explain(redis_server.url)
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(file))
    file.write_bytes(b"\xff\xfe secret")
    with pytest.raises(RedisUnreachable, match=r"PASSWORD_FILE cannot be read: .*password is no text: invalid start"):
        connect_or_explain(redis_server.url)


@pytest.mark.parametrize(
    ("url", "without"),
    [
        ("redis+sentinel://me:s3cret@a:1,b:2/shop", "redis+sentinel://me@a:1,b:2/shop"),
        ("redis+cluster://:s3cret@a:1,b:2", "redis+cluster://a:1,b:2"),
        ("rediss://me:s3cret@a:1?ssl_ca_certs=/ca.pem", "rediss://me@a:1?ssl_ca_certs=/ca.pem"),
    ],
)
def test_a_password_is_taken_out_of_every_form_of_url(url: str, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_REDIS_PASSWORD", "")
    assert without_password(url) == without
    assert os.environ["SLIPSTREAM_REDIS_PASSWORD"] == "s3cret"


@pytest.mark.parametrize("url", ["redis+sentinel://a:1", "redis+sentinel://a/shop", "redis+cluster://", "http://a:1"])
def test_what_is_no_url_of_redis_is_refused_with_the_forms_there_are(url: str) -> None:
    with pytest.raises(RedisUnreachable, match=r"must be redis://host:port, rediss://"):
        connect_or_explain(url)
