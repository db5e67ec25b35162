"""`slipstream serve envs`: who may connect, which messages are refused, and how it ends."""

import asyncio
import contextlib
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from slipstream.envhub.env import EnvError
from slipstream.envhub.remote.env_client import EnvClient
from slipstream.envhub.remote.env_protocol import ErrorResponse, Open, Reset, StepEnv, decode_response, encode_message
from slipstream.tools.cli.cli import main
from tests.envhub.env_hosts import TASK, UNRULY, EnvHost, env_host, env_process, far


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    with env_host(tmp_path_factory.mktemp("envs"), f"--names=kg,grid,{UNRULY}") as running:
        yield running


def test_a_client_needs_the_secret_which_no_log_contains_and_sigterm_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("s3cret-of-mine\n")
    settings = [f"--key-file={tmp_path / 'secret'}", "--names=grid", "--processes=1"]
    with env_host(tmp_path, *settings) as host:
        assert host.health()["status"] == "ok"
        for wrong in ("", "another"):
            monkeypatch.setenv("SLIPSTREAM_ENVS_KEY", wrong)
            with pytest.raises(EnvError, match=r"refuses with status 401; set SLIPSTREAM_ENVS_KEY"):
                asyncio.run(far(host.url, "grid").reset(TASK))
        monkeypatch.setenv("SLIPSTREAM_ENVS_KEY", "s3cret-of-mine")
        by_file = EnvClient(url=host.url, env="grid", key_file=str(tmp_path / "secret"))
        for env in (far(host.url, "grid"), by_file):
            asyncio.run(env.reset(TASK))
            asyncio.run(env.close())
        host.process.send(signal.SIGTERM)
        assert host.process.wait(60) == 75
        assert "s3cret" not in host.process.said()


def test_an_unsendable_secret_is_refused_and_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("", "two words", "line\nline", "p\u00e4ss"):
        (tmp_path / "secret").write_text(content)
        assert main(["serve", "envs", f"--key-file={tmp_path / 'secret'}"]) == 2
        said = capsys.readouterr().err
        assert "must contain printable ASCII without spaces" in said and (not content or content not in said)


def opening(options: bytes, env: str = "kg") -> bytes:
    return encode_message(Open(env=env, options=msgspec.Raw(options)))


def bombs() -> dict[str, bytes]:
    many = b"\xdd" + struct.pack(">I", 7_000_000) + b"\x90" * 7_000_000
    deep = b"\x81\xa1a" * 20_000 + b"\x00"
    return {
        "garbage": b"\xc1\xff\x00 what",
        "not MessagePack": b"reset",
        "empty": b"",
        "an unknown request": msgspec.msgpack.encode({"type": "Shutdown"}),
        "a field too many": opening(b"\x80").replace(b"\x83", b"\x84", 1) + b"\xa1x\x01",
        "options that are many empty lists": opening(b"\x81\xa4hops" + many),
        "options that are deep": opening(deep),
        "a step before the start": encode_message(StepEnv(action="x")),
        "larger than any": b"\x00" * (9 << 20),
    }


@pytest.mark.parametrize("bomb", bombs().values(), ids=bombs().keys())
async def test_hostile_messages_are_refused_and_cost_the_server_no_memory(host: EnvHost, bomb: bytes) -> None:
    async def send() -> bytes | None:
        """The answer; None where the connection is closed instead."""
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{host.url}/v1/episode") as connection:
            with contextlib.suppress(ConnectionError):
                await connection.send_bytes(bomb)
                reply = await connection.receive()
                return reply.data if reply.type is aiohttp.WSMsgType.BINARY else None
            return None

    before = host.most_held_bytes()
    reply = await send()
    assert reply is None or isinstance(decode_response(reply), ErrorResponse)
    assert host.most_held_bytes() - before < 128 << 20
    host.wait_until(lambda health: health["episodes"] == 0, "the slot")
    env = far(host.url, "grid")
    await env.reset(TASK)
    await env.close()


async def test_a_client_that_sends_before_it_was_answered_is_disconnected(host: EnvHost) -> None:
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{host.url}/v1/episode") as connection:
        for ask in (opening(b"\x80", UNRULY), encode_message(Reset(task=TASK))):
            await connection.send_bytes(ask)
            await connection.receive()
        for _ in range(2):
            await connection.send_bytes(encode_message(StepEnv(action="dawdle")))
        assert (await connection.receive()).type is aiohttp.WSMsgType.CLOSE
    host.wait_until(lambda health: health["episodes"] == 0, "the slot")


def test_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    with env_host(tmp_path, "--names=grid") as host:
        env, workers = far(host.url, "grid"), host.workers()
        asyncio.run(env.reset(TASK))
        assert len(workers) == 2
        host.process.send(signal.SIGINT)
        assert host.process.wait(60) == 130
        assert "stopping; closing 1 episodes" in host.process.said()
        assert not any(worker.is_running() for worker in workers)
        with pytest.raises(EnvError, match=r"is lost: it closed the connection .*the server ends"):
            asyncio.run(env.step("up"))


def test_what_cannot_be_served_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for setting, complaint in (
        ("--names=kgg", "`--names` must be one of"),
        ("--processes=0", "`--processes` must be >= 1, got 0"),
        ("--port=70000", "`--port` must be in [0, 65535], got 70000"),
    ):
        assert main(["serve", "envs", setting]) == 2
        assert complaint in capsys.readouterr().err


def test_workers_that_do_not_start_end_the_server_with_their_code(tmp_path: Path) -> None:
    refusing = 'import os, sys\nif "slipstream.envhub.serving.env_worker" in sys.orig_argv:\n    os._exit(3)\n'
    (tmp_path / "sitecustomize.py").write_text(refusing)
    server = env_process(tmp_path, "--names=grid", "--port=0", PYTHONPATH=str(tmp_path))
    assert server.wait(90) == 1
    assert "a worker ended with 3 before it was ready" in server.said()


def test_a_port_that_is_taken_is_explained(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = env_process(tmp_path, "--names=grid", "--processes=1", f"--port={port}")
        assert server.wait(90) == 2
        assert f"`--port` {port} cannot be bound" in server.said()
