"""Engine processes that are forks of one that has imported vLLM: the import is most of the start of a tiny engine."""

import os
import select
import signal
import socket
import subprocess
import sys
from functools import partial
from multiprocessing.connection import Connection

from actors.vllm_engine import EngineProcess
from actors.vllm_environment import vllm_environment
from common.shutdown import die_with_parent

IMPORT_TIMEOUT_S = 300.0


class Parent:
    """The process that imports vLLM, and forks for each engine."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.forked_engine", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | vllm_environment(),
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self._socket.settimeout(IMPORT_TIMEOUT_S)

    def fork(self, connection: int) -> int:
        """Start an engine that serves the socket `connection`; return its process id."""
        socket.send_fds(self._socket, [b"fork"], [connection])
        return int(self._socket.recv(32))

    def close(self) -> None:
        self._socket.close()
        self._popen.wait()


class ForkedEngine(EngineProcess):
    """An engine process whose parent is another process."""

    def __init__(self, parent: Parent) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = Forked(parent.fork(theirs.fileno()))  # type: ignore[assignment]
        self._connection = Connection(ours.detach())


class Forked:
    """As much of `subprocess.Popen` as an engine's process needs, of a process that this one did not start."""

    returncode = None  # only the parent knows it

    def __init__(self, pid: int) -> None:
        self.pid, self._pidfd = pid, os.pidfd_open(pid)

    def wait(self, timeout_s: float | None = None) -> None:
        if not select.select([self._pidfd], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired("engine", timeout_s or 0.0)

    def kill(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def serve(requests: socket.socket) -> None:
    """Fork for each request, until the other end is closed."""
    from actors import serve_engine

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end leave nothing behind
    me = os.getpid()
    while (received := socket.recv_fds(requests, 32, 1))[0]:
        (connection,) = received[1]
        if pid := os.fork():
            requests.sendall(str(pid).encode())
            os.close(connection)
            continue
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(me)
        serve_engine.main(Connection(connection))
        os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
