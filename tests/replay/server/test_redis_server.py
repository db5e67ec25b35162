"""The server that a run starts for itself."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import redis

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.server import redis_server as server_module
from slipstream.replay.server.redis_server import Server, find_executable, password_of, start_private_server
from slipstream.replay.server.redis_version import ServerError, Version, version_of
from slipstream.tools.lab.loopback_server import start_server
from tests.full_disk import largest_file
from tests.stand_ins import aof_of, log_of
from tests.waiting import wait_until

START_AND_DIE = """
import os, signal, sys
from pathlib import Path
from slipstream.common.process.connection import connect
from slipstream.tools.lab.loopback_server import start_server

server = start_server(Path(sys.argv[1]))
connect(server.secret_url).set("kept", "yes")
print(server.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_machine_without_any_server_is_told_where_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_path(tmp_path, monkeypatch, "echo 'Redis server v=5.0.14 sha=00000000:0 malloc=libc bits=64'")
    monkeypatch.setattr(server_module, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"no Redis or Valkey server of version 6\.2\.0 or newer is found; run `make"):
        find_executable()


def test_a_current_server_on_the_path_goes_before_the_bundled_one_and_an_older_one_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tells Valkey apart is its words: distributions also install it as redis-server."""
    says = "echo '{} server v={} sha=00000000:0 malloc=libc bits=64 build=1536df31c0395150'"
    older = put_on_path(tmp_path, monkeypatch, says.format("Redis", "7.0.15"))
    assert find_executable() == server_module._bundled()
    monkeypatch.setattr(server_module, "_bundled", lambda: None)
    assert find_executable() == str(older)
    monkeypatch.undo()
    valkey = put_on_path(tmp_path, monkeypatch, says.format("Valkey", "7.2.0"))
    assert find_executable() == str(valkey) and version_of(str(valkey)) == Version(7, 2, 0, "Valkey")


FORBIDDEN = (
    *("CONFIG GET dir", "CONFIG SET dir /", "DEBUG SLEEP 0", "MODULE LIST", "MODULE LOAD x.so", "ACL SETUSER x on"),
    *("REPLICAOF h 1", "SHUTDOWN", "MIGRATE h 1 k 0 1"),
)


def test_the_server_wants_its_password_never_evicts_and_can_be_changed_and_read_by_nobody_else(tmp_path: Path) -> None:
    directory = tmp_path / "redis"
    with start_server(directory) as server, connect(server.secret_url) as client:
        for command in FORBIDDEN:
            # From Redis 7 on, some are refused to every user.
            with pytest.raises(redis.ResponseError, match=r"no permissions|command not allowed"):
                client.execute_command(*command.split())  # type: ignore[no-untyped-call]
        with connect(server.admin_url) as admin:
            wanted = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "always"}
            assert {name: admin.config_get(name)[name] for name in wanted} == wanted
            assert admin.config_get("dir") == {"dir": str(directory)}
        with connect(server.url) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert server.password not in " ".join(psutil.Process(server.process.pid).cmdline())
        assert server.password not in server.url and server.password in server.secret_url
        assert stat.S_IMODE((directory / "redis.conf").stat().st_mode) == 0o600
        addresses = {c.laddr.ip for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"}
        assert addresses == {"127.0.0.1"}
        client.set("kept", "secret")
        client.bgrewriteaof()
        wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], "the end of the rewrite")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [path for path in directory.rglob("*") if path.is_file() and path.stat().st_mode & 0o077] == []


def test_a_private_server_can_be_reached_by_its_socket_alone_which_only_its_user_may_open(tmp_path: Path) -> None:
    with start_private_server(tmp_path / "redis") as server, connect(server.secret_url) as client:
        client.set("kept", "yes")
        found = psutil.Process(server.process.pid).net_connections("inet")
        assert [connection for connection in found if connection.status == "LISTEN"] == []
        assert isinstance(server.address, Path) and stat.S_IMODE(server.address.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.address.parent.stat().st_mode) == 0o700
        with connect(server.url) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert password_of(tmp_path / "redis", server.url) == server.password
        server.process.kill()
        assert server.process.wait() == -signal.SIGKILL and server.keep_up() == -signal.SIGKILL
        assert client.get("kept") == b"yes"
    with start_server(tmp_path / "redis") as public, connect(public.secret_url) as client:
        assert client.get("kept") == b"yes"


@pytest.mark.parametrize("start", [start_server, start_private_server])
@pytest.mark.parametrize("name", ["a space, ümlaut #1 %41", "long" * 40, 'a"quote, a\\backslash'])
def test_a_directory_may_have_any_name(name: str, start: Callable[[Path], Server], tmp_path: Path) -> None:
    directory = tmp_path / name
    with start(directory) as server, connect(server.secret_url) as client:
        client.set("kept", "yes")
        assert isinstance(server.address, int) or len(os.fsencode(server.address)) <= 107
    assert aof_of(directory).exists() and log_of(directory)


def test_a_client_without_a_password_that_takes_no_replies_is_cut_off(tmp_path: Path) -> None:
    """It sends what is refused, as fast as it can, and reads nothing."""
    refused = b"*2\r\n$3\r\nGET\r\n$1\r\nx\r\n" * 5000
    with start_server(tmp_path) as server, connect(server.secret_url) as client:
        before = client.info("memory")["used_memory"]
        flood = socket.create_connection(("127.0.0.1", server.port))
        flood.settimeout(0.2)
        deadline, is_cut = time.monotonic() + 60, False
        while not is_cut and time.monotonic() < deadline:
            try:
                flood.sendall(refused)
            except TimeoutError:
                pass
            except OSError:
                is_cut = True
        flood.close()
        assert is_cut, "the server did not cut it off"
        assert client.info("memory")["used_memory"] - before < 16 << 20
        assert client.info("memory")["used_memory_peak"] < 640 << 20


def put_on_path(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    program = directory / "redis-server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))  # no server of this machine
    return program


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"#!/bin/sh\necho hello\n", r"is neither Redis nor Valkey: --version printed 'hello\\n'"),
        (b"#!/bin/sh\nprintf '\\377'\n", "is neither Redis nor Valkey"),
        (b"\x7fELF of another machine", "does not run: .*Exec format error: .*; remove it from the PATH"),
        (b"#!/bin/sh\nsleep 60\n", "does not run: .*timed out after 0.2 seconds; remove it from the PATH"),
    ],
    ids=["words", "bytes", "another machine's", "one that hangs"],
)
def test_a_program_that_is_no_redis_server_is_named(
    content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.replay.server.redis_version.VERSION_TIMEOUT_S", 0.2 if b"sleep" in content else 20)
    other = tmp_path / "redis-server"
    other.write_bytes(content)
    other.chmod(0o755)
    with pytest.raises(ServerError, match=f"redis-server {said}"):
        version_of(str(other))


def test_the_server_ends_with_its_parent_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START_AND_DIE, str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert child.returncode == -signal.SIGKILL, child.stderr
    pid = int(child.stdout)
    with start_server(tmp_path) as server, connect(server.secret_url) as client:
        assert client.get("kept") == b"yes"

    def has_ended() -> bool:
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    wait_until(has_ended, "the server to end with its parent", timeout_s=20)


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


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\xff", b"port 6379\n", b"port x\nrequirepass y\n", b"requirepass y\nport "]
)
def test_settings_that_lack_the_port_or_the_password_are_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "redis.conf").write_bytes(content)
    for read in (partial(password_of, url="redis://127.0.0.1:1/0"), start_server):
        with pytest.raises(ConfigError, match=r"redis\.conf must have the lines .*or remove it: the next start"):
            read(tmp_path)


def test_data_that_an_older_server_passes_over_are_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis" / "appendonlydir").mkdir(parents=True)
    old = put_on_path(tmp_path, monkeypatch, "echo 'Redis server v=6.2.14 sha=00000000:0 malloc=jemalloc bits=64'")
    monkeypatch.setattr(server_module, "_bundled", lambda: str(old))
    with pytest.raises(ServerError, match=r"of version 7 or newer, and .* is version 6\.2\.14, which cannot read it"):
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


def test_a_port_and_a_directory_in_use_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_server(tmp_path) as server:
        port = server.port
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        with pytest.raises(ServerError, match=rf"0.1:{port}/0 ended during its start(.|\n)*Address already in use"):
            start_server(tmp_path)
    with start_server(tmp_path) as server:
        assert server.port == port
        monkeypatch.setattr(server_module, "START_TIMEOUT_S", 0.3)
        with pytest.raises(ServerError, match="another redis-server has been using"):
            start_server(tmp_path)


def test_a_file_that_cannot_be_read_back_and_a_log_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    start_server(tmp_path).stop()
    aof_of(tmp_path).write_bytes(b"*3\r\n$3\r\nSET\r\nthis is not an append-only file\r\n" * 3)
    with pytest.raises(ServerError, match="Bad file format reading the append only file"):
        start_server(tmp_path)
    (tmp_path / "redis.log").unlink()
    (tmp_path / "redis.log").symlink_to(tmp_path / "nowhere" / "redis.log")
    with pytest.raises(ServerError, match=r"during its start \(exit 1\); it could not write its log .*redis\.log"):
        start_server(tmp_path)
