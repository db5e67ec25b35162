"""The server that a run starts for itself."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from common.connection import connect
from common.run_dir import RunDir
from replay import server as server_module
from replay.server import MIN_VERSION, ServerError, find_executable, start_server, version_of
from tests.full_disk import largest_file

START_AND_DIE = """
import os, signal, sys
from pathlib import Path
from common.connection import connect
from replay.server import start_server

server = start_server(Path(sys.argv[1]))
connect(server.secret_url).set("kept", "yes")
print(server.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_server_is_new_enough() -> None:
    assert version_of(find_executable()) >= MIN_VERSION


def test_an_old_server_on_the_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = put_on_path(tmp_path, monkeypatch, "echo 'Redis server v=5.0.14 sha=00000000:0 malloc=jemalloc bits=64'")
    assert version_of(str(old)) == (5, 0)
    assert find_executable() != str(old)


def put_on_path(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    program = directory / "redis-server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return program


def test_a_program_that_is_no_redis_server_is_named(tmp_path: Path) -> None:
    other = tmp_path / "redis-server"
    other.write_text("#!/bin/sh\necho hello\n")
    other.chmod(0o755)
    with pytest.raises(ServerError, match=r"says 'hello\\n', which is no redis-server"):
        version_of(str(other))


def test_the_server_wants_its_password_and_keeps_it_out_of_the_command_line(tmp_path: Path) -> None:
    with start_server(tmp_path) as server:
        with connect(server.url) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert server.password not in " ".join(psutil.Process(server.process.pid).cmdline())
        assert server.password not in server.url and server.password in server.secret_url
        assert stat.S_IMODE((tmp_path / "redis.conf").stat().st_mode) == 0o600
        addresses = {c.laddr.ip for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"}
        assert addresses == {"127.0.0.1"}


def test_the_server_keeps_what_it_holds_and_never_evicts(tmp_path: Path) -> None:
    with start_server(tmp_path) as server, connect(server.secret_url) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("appendfsync") == {"appendfsync": "always"}


def test_a_server_started_again_has_its_data_port_and_password(tmp_path: Path) -> None:
    with start_server(tmp_path) as first, connect(first.secret_url) as client:
        client.set("kept", "yes")
    assert first.process.returncode == 0
    with start_server(tmp_path) as second, connect(first.secret_url) as client:
        assert second.url == first.url
        assert client.get("kept") == b"yes"
    second.stop()  # a second time: nothing happens


def test_the_server_ends_with_its_parent_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", START_AND_DIE, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    pid = int(child.stdout)
    with start_server(tmp_path) as server, connect(server.secret_url) as client:
        assert client.get("kept") == b"yes"
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.05)


def test_two_servers_never_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "START_TIMEOUT_S", 0.3)
    with start_server(tmp_path), pytest.raises(ServerError, match="another redis-server still uses"):
        start_server(tmp_path)


def test_a_directory_that_was_copied_is_served_where_it_is(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with start_server(old) as server, connect(server.secret_url) as client:
        client.set("written", "before")
    shutil.copytree(old, new)
    with start_server(new) as server, connect(server.secret_url) as client:
        assert client.get("written") == b"before"
        client.set("written", "in the copy")
    with start_server(old) as server, connect(server.secret_url) as client:
        assert client.get("written") == b"before"
        with pytest.raises(ServerError, match="Address already in use"):  # not taken for the copy's own
            start_server(new)
    assert "Address already in use" not in (old / "redis.log").read_text()


@pytest.mark.parametrize("name", ['a"quote', "a\\backslash", "a space, ümlaut #1"])
def test_a_directory_may_have_any_name(tmp_path: Path, name: str) -> None:
    with start_server(tmp_path / name) as server, connect(server.secret_url) as client:
        client.set("kept", "yes")
    assert {"appendonly.aof", "redis.log"} <= {path.name for path in (tmp_path / name).iterdir()}


def test_data_that_an_older_server_would_pass_over_are_not_served_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "redis" / "appendonlydir").mkdir(parents=True)
    put_on_path(tmp_path, monkeypatch, "echo 'Redis server v=6.2.14 sha=00000000:0 malloc=jemalloc bits=64'")
    with pytest.raises(ServerError, match=r"of version 7 or newer, and .* is of version 6\.2, which cannot read it"):
        start_server(tmp_path / "redis")


def test_a_full_disk_leaves_nothing_that_a_later_start_stumbles_over(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "run")
    run_dir.create()
    with largest_file(bytes_allowed=0):
        with pytest.raises(OSError, match="File too large"):
            run_dir.start_clock()
        with pytest.raises(OSError, match="File too large"):
            start_server(run_dir.redis)
    assert run_dir.start_clock() == run_dir.start_clock()
    start_server(run_dir.redis).stop()


def test_a_port_in_use_is_named_with_the_servers_own_words(tmp_path: Path) -> None:
    with start_server(tmp_path) as server:
        port = server.port
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        with pytest.raises(ServerError, match=rf"127.0.0.1:{port} ended at its start(.|\n)*Address already in use"):
            start_server(tmp_path)
    with start_server(tmp_path) as server:
        assert server.port == port


def test_a_file_that_cannot_be_read_back_is_named_with_the_servers_own_words(tmp_path: Path) -> None:
    start_server(tmp_path).stop()
    (tmp_path / "appendonly.aof").write_bytes(b"*3\r\n$3\r\nSET\r\nthis is not an append-only file\r\n" * 3)
    with pytest.raises(ServerError, match="Bad file format reading the append only file"):
        start_server(tmp_path)
