"""Redis servers as a fleet has them: a cluster, a master with a replica and a sentinel, TLS in front; on loopback."""

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from os import getpid
from pathlib import Path
from typing import Any

import redis

from slipstream.common.process.shutdown import die_with_parent
from slipstream.replay.server.redis_server import find_executable
from tests.waiting import wait_until

DEADLINE_S = 60.0
MAX_CLUSTER_PORT = 55_000  # a node's bus listens 10,000 above


class Node:
    """A server without a password."""

    def __init__(self, directory: Path, *settings: str, port: int = 0, sentinel: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self._config = directory / "redis.conf"
        lines = [f"port {self.port}", "bind 127.0.0.1", f'dir "{directory}"', f'logfile "{directory}/redis.log"']
        self._config.write_text("\n".join([*lines, *settings, ""]))
        self._sentinel = ["--sentinel"] if sentinel else []
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [find_executable(), str(self._config), *self._sentinel],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, getpid()),
        )
        wait_until(self._answers)

    def call(self, *command: str) -> Any:
        with redis.Redis(port=self.port) as client:
            return client.execute_command(*command)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        assert self.process.poll() is None
        with contextlib.suppress(redis.ConnectionError):
            return bool(self.call("PING"))
        return False


@contextlib.contextmanager
def cluster(directory: Path, *, num_nodes: int = 3) -> Iterator[list[Node]]:
    """Masters that share the slots among them."""
    nodes: list[Node] = []
    try:
        for number in range(num_nodes):
            # Syncing every second, it puts writes off while a sync is under way, and a kill loses what it acknowledged.
            aof = ("appendonly yes", "appendfsync no")
            settings = ("cluster-enabled yes", "cluster-node-timeout 2000", *aof)
            nodes.append(Node(directory / str(number), *settings, port=free_port(below=MAX_CLUSTER_PORT)))
        for number, node in enumerate(nodes):
            first, last = number * 16384 // num_nodes, (number + 1) * 16384 // num_nodes
            node.call("CLUSTER", "ADDSLOTS", *map(str, range(first, last)))
            node.call("CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port))
        wait_until(lambda: all(is_whole(node) for node in nodes))
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def is_whole(node: Node) -> bool:
    return "cluster_state:ok" in repr(node.call("CLUSTER", "INFO"))


@contextlib.contextmanager
def replicated(directory: Path) -> Iterator[tuple[Node, Node, Node]]:
    """A master, its replica, and a sentinel that promotes the replica when the master is gone for a second."""
    nodes: list[Node] = []
    try:
        master = Node(directory / "master")
        nodes.append(master)
        replica = Node(directory / "replica", f"replicaof 127.0.0.1 {master.port}")
        nodes.append(replica)
        wait_until(lambda: b"master_link_status:up" in raw_info(replica))
        sentinel = Node(
            directory / "sentinel",
            f"sentinel monitor shop 127.0.0.1 {master.port} 1",
            "sentinel down-after-milliseconds shop 1000",
            "sentinel failover-timeout shop 5000",
            sentinel=True,
        )
        nodes.append(sentinel)
        wait_until(lambda: f":{replica.port}".encode() in repr(sentinel.call("SENTINEL", "REPLICAS", "shop")).encode())
        yield master, replica, sentinel
    finally:
        for node in nodes:
            node.kill()


def raw_info(node: Node) -> bytes:
    with socket.create_connection(("127.0.0.1", node.port)) as connection:
        connection.sendall(b"INFO replication\r\n")
        return connection.recv(1 << 16)


def certificate(directory: Path, *, address: str = "127.0.0.1") -> tuple[Path, Path]:
    """A certificate for `address` that is its own authority, and its key."""
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=slipstream-test",
            "-addext",
            f"subjectAltName=IP:{address}",
            "-keyout",
            str(key),
            "-out",
            str(certificate),
        ],
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    return certificate, key


@contextlib.contextmanager
def tls_in_front_of(port: int, certificate: Path, key: Path) -> Iterator[int]:
    """The port where TLS is spoken; what comes through goes to `port` in the clear."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, context, port), daemon=True).start()
        yield listener.getsockname()[1]


def _accept(listener: socket.socket, context: ssl.SSLContext, port: int) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(connection, context, port), daemon=True).start()


def _serve(connection: socket.socket, context: ssl.SSLContext, port: int) -> None:
    """One thread owns both directions: an SSLSocket is not for two."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(connection, server_side=True) as secure,
    ):
        secure.settimeout(0.005)
        plain.settimeout(0.005)
        while _moved(secure, plain) and _moved(plain, secure):
            pass


def _moved(source: socket.socket, target: socket.socket) -> bool:
    """Move what has come; False at the end."""
    try:
        data = source.recv(1 << 16)
    except TimeoutError:
        return True
    target.settimeout(None)
    target.sendall(data)
    target.settimeout(0.005)
    return bool(data)


def free_port(*, below: int = 65_536) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < below:
            return port
