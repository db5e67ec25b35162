"""Pulls under a key: who has it, who has none or another, and where it comes from."""

from pathlib import Path

import pytest
import zmq

from slipstream.actors.weights.pull import PullFailed
from slipstream.common.process.config_error import ConfigError
from slipstream.common.transfer.encryption import KEY_VARIABLE, CurveKey, key_from_environment, load_key, new_secret
from tests.actors.chunks import DATA, Pulling, ask, serving


def new_key() -> CurveKey:
    public, secret = zmq.curve_keypair()
    return CurveKey(public=public, secret=secret)


def test_only_who_has_the_key_pulls_and_only_from_a_server_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.actors.weights.fetch.SILENCE_S", 1.0)
    monkeypatch.setattr("slipstream.actors.weights.pull.GIVE_UP_S", 0.5)
    key, other = new_key(), new_key()
    with serving(key=key) as server, serving() as impostor:
        with zmq.Context() as context, context.socket(zmq.DEALER) as knowing:  # what a server shows is no secret
            knowing.setsockopt(zmq.LINGER, 0)
            knowing.curve_serverkey = key.public
            knowing.curve_publickey, knowing.curve_secretkey = other.public, other.secret
            knowing.connect(server.endpoint)
            ask(knowing, 0)
            assert not knowing.poll(1000)
        for strange in (None, other):
            with Pulling(key=strange) as stranger, pytest.raises(PullFailed, match="40 of 40 chunks missing"):
                stranger.pull(server.endpoint)
        assert server.load.served_bytes == 0
        with Pulling(key=key) as member:
            with pytest.raises(PullFailed, match="40 of 40 chunks missing"):
                member.pull(impostor.endpoint)
            assert impostor.load.served_bytes == 0
            assert member.pull(server.endpoint) == DATA


def test_a_key_is_of_the_environment_or_a_file_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "")  # what is set below is undone at the end
    assert key_from_environment() is None
    (tmp_path / "key").write_text(new_secret() + "\n")
    load_key(str(tmp_path / "key"))
    key = key_from_environment()
    assert key is not None and key.secret.decode() == (tmp_path / "key").read_text().strip()
    assert key.secret.decode() not in repr(key)


def test_a_file_without_a_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "")
    key = tmp_path / "key"
    for content, why in (
        (None, "cannot be read: No such file"),
        (b"\xff" * 40, "cannot be read: 'utf-8' codec can't decode"),
        (b"\n", "is empty"),  # as `slipstream access key` leaves it on a full disk
    ):
        if content is not None:
            key.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"`weights.key_file` {key} {why}.*; `slipstream access key` makes"):
            load_key(str(key))


@pytest.mark.parametrize("secret", ["short", "\udcff" * 5])
def test_a_variable_that_is_no_key_is_refused(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, secret)
    with pytest.raises(ConfigError, match="must contain the 40 characters that `slipstream access key` makes; got 5"):
        key_from_environment()
