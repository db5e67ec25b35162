"""A cloud's metadata service on loopback: it gives the answers that a test puts there, and keeps what it was asked."""

import http
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class MetadataService:
    """Serves while it is entered. What has no answer is a 404."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}  # status and body, by path and query
        self.asked: list[tuple[str, str, dict[str, str]]] = []  # method, path and query, headers in lower case
        self.tokens: list[str] | None = None  # the valid tokens, newest last; None if no token is required
        self.delay_s = 0.0
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service._answer(self)

            def do_PUT(self) -> None:
                service._answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]

    def wants_tokens(self) -> None:
        """From now on it is as IMDSv2: only a token that it gave, and has not forgotten, is answered."""
        self.tokens = []

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.command, request.path, headers))
        time.sleep(self.delay_s)
        status, body = self.answers.get(request.path, (404, "not found"))
        if self.tokens is not None:
            if request.path == "/latest/api/token":
                self.tokens.append(f"token-{len(self.asked)}")
                status, body = 200, self.tokens[-1]
            elif headers.get("x-aws-ec2-metadata-token") not in self.tokens:
                status, body = 401, "unauthorized"
        request.send_response(status)
        if status == http.HTTPStatus.FOUND:
            request.send_header("Location", body)
        request.send_header("Content-Length", str(len(body.encode())))
        request.end_headers()
        request.wfile.write(body.encode())
