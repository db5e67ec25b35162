"""The forms of `redis.url`: every verb works over each of them, and passwords stay where they belong."""

import os
import socket
from pathlib import Path

import psutil
import pytest

from slipstream.common.process.connection import (
    PASSWORD_FILE_VARIABLE,
    RedisUnreachable,
    connect,
    connect_or_explain,
    own_address,
    without_password,
)
from slipstream.replay.server.redis_server import start_private_server
from slipstream.tools.cli.cli import main
from slipstream.tools.lab.loopback_server import Server
from tests.common.process.tls_front import certificate, tls_in_front_of
from tests.replay.buffer.every_verb import play_every_verb


def play(url: str, run_id: str) -> None:
    with connect_or_explain(url) as client:
        play_every_verb(run_id, learner=client, actor=client, viewer=client)


def test_every_verb_works_over_a_socket_file(tmp_path: Path, run_id: str) -> None:
    with start_private_server(tmp_path) as server:
        play(server.secret_url, run_id)


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
def test_a_wrong_option_of_a_url_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]) -> None:
    assert main([*verb, "redis.url=redis://:secret@h:1?x=y", f"run.root={tmp_path}/runs"]) == 2
    message = capsys.readouterr().err
    assert "has a wrong option after `?`: " in message and "'x'; remove it" in message and "secret" not in message


def test_auto_is_the_address_by_which_this_machine_reaches_redis() -> None:
    nics = psutil.net_if_addrs().values()
    for address in [each.address for nic in nics for each in nic if each.family is socket.AF_INET]:
        assert own_address("auto", f"redis://me:x@{address}:1/1") == address
    for url in ("", "unix:///run/redis.sock", "redis://localhost"):
        assert (own_address("auto", url), own_address("10.0.0.1", url)) == ("127.0.0.1", "10.0.0.1")


def test_a_user_name_may_hold_any_character() -> None:
    with connect("redis://us%40er:pass%2Fword@127.0.0.1:1/0") as client:
        assert client.connection_pool.connection_kwargs["username"] == "us@er"
        assert client.connection_pool.connection_kwargs["password"] == "pass/word"


def test_a_password_may_come_from_a_file(redis_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    file.write_text(f"{redis_server.password}\n")
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(file))
    with connect_or_explain(redis_server.url) as client:
        assert client.ping()
    file.write_bytes(b"\xff\xfe secret")
    with pytest.raises(RedisUnreachable, match=r"PASSWORD_FILE cannot be read: .*password is no text: invalid start"):
        connect_or_explain(redis_server.url)
    file.unlink()
    with pytest.raises(RedisUnreachable, match=r"PASSWORD_FILE cannot be read: .*password'; set it to a file"):
        connect_or_explain(redis_server.url)


@pytest.mark.parametrize(
    ("url", "without"),
    [
        ("redis://:s3cret@a:1/2", "redis://a:1/2"),
        ("rediss://me:s3cret@a:1?ssl_ca_certs=/ca.pem", "rediss://me@a:1?ssl_ca_certs=/ca.pem"),
    ],
)
def test_a_password_is_taken_out_of_every_form_of_url(url: str, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_REDIS_PASSWORD", "")
    assert without_password(url) == without
    assert os.environ["SLIPSTREAM_REDIS_PASSWORD"] == "s3cret"


@pytest.mark.parametrize("url", ["redis+sentinel://a:1/shop", "redis+cluster://a:1", "http://a:1"])
def test_what_is_no_url_of_redis_is_refused_with_the_forms_there_are(url: str) -> None:
    with pytest.raises(RedisUnreachable, match=r"must be redis://host:port, rediss://"):
        connect_or_explain(url)


@pytest.mark.parametrize("url", ["rediss//:s3cret@a:1", "redis:s3cret@a:1", "s3cret@a:1", "redis://:s3/cret@a:1"])
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(RedisUnreachable, match=r"\*\*\*@a:1") as refused:
        connect(without_password(url))
    assert "cret" not in str(refused.value)
