"""An HTTP server on loopback that answers each request as a test says, for the stand-ins of services."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

Reply = tuple[int, Mapping[str, str], bytes]  # status, headers, body


@dataclass(frozen=True, slots=True)
class Asked:
    """A request."""

    method: str
    path: str  # and query
    headers: Message  # found in any case
    body: bytes


class HttpStandIn:
    """Answers by `answer`, which other threads may call at the same time; None closes the connection."""

    def __init__(self, answer: Callable[[Asked], Reply | None]) -> None:
        class Endpoint(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                reply = answer(Asked(self.command, self.path, self.headers, body))
                if reply is None:
                    return self.connection.close()
                status, headers, content = reply
                with contextlib.suppress(OSError):  # the client has gone
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(content)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)

            do_POST = do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
