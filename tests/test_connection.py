"""The forms of `redis.url`: every verb works over each of them, and passwords stay where they belong."""

import os
from pathlib import Path

import pytest
import redis

from common.connection import PASSWORD_FILE_VARIABLE, RedisUnreachable, connect, connect_or_explain, without_password
from replay.server import Server
from tests.every_verb import play_every_verb
from tests.redis_nodes import Node, certificate, cluster, replicated, tls_in_front_of


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


def test_the_password_may_come_from_a_file(
    redis_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text(f"{redis_server.password}\n")
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(file))
    with connect_or_explain(redis_server.url) as client:
        assert client.ping()
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(RedisUnreachable, match=r"SLIPSTREAM_REDIS_PASSWORD_FILE: .*nowhere'; name a file"):
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
