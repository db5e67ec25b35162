"""TLS in front of a server, on loopback."""

import contextlib
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

DEADLINE_S = 60.0


def certificate(directory: Path, *, address: str = "127.0.0.1") -> tuple[Path, Path]:
    """A certificate for `address` that is its own authority, and its key."""
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    ask = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=slipstream-test"
    command = [*ask.split(), "-addext", f"subjectAltName=IP:{address}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
    return certificate, key


@contextlib.contextmanager
def tls_in_front_of(port: int, certificate: Path, key: Path) -> Iterator[int]:
    """The port where TLS is spoken; what comes through goes to `port` in the clear."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            """One thread owns both directions: an SSLSocket is not for two."""
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port)) as plain,
                context.wrap_socket(self.request, server_side=True) as secure,
            ):
                secure.settimeout(0.005)
                plain.settimeout(0.005)
                while _moved(secure, plain) and _moved(plain, secure):
                    pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


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
