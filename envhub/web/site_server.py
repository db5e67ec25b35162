"""The HTTP server of a process: one server on loopback, on a free port, for all episodes that the process plays.

The server keeps no state between two actions. A visit brings the state of a site, and the caller reads the new state
from it afterwards. The Host header identifies the visit, by a random name that cannot be guessed.
"""

import atexit
import functools
import os
import secrets
import socketserver
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler

from slipstream.envhub.web.site import Request, Site, SiteState, respond

COOKIE = "session"
MAX_BODY_BYTES = 10_000
MAX_FIELDS = 20
TIMEOUT_S = 10.0  # of one read from a browser


class Visit:
    """One site during an action. `state` is its state after the last request."""

    def __init__(self, site: Site, state: SiteState, *, host: str, port: int) -> None:
        self.site = site
        self.state = state
        self.host = host
        self.port = port


class WebServer:
    """A server that answers requests in its own threads until `close`."""

    def __init__(self) -> None:
        self._listener = _Listener(("127.0.0.1", 0), _Handler)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._listener.serve_forever, name="web-server", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.server_address[1])

    @contextmanager
    def visit(self, site: Site, state: SiteState) -> Iterator[Visit]:
        """Serve `site` under a new random host name while the block runs."""
        visit = Visit(site, state, host=secrets.token_hex(16), port=self.port)
        self._listener.visits[visit.host] = visit
        try:
            yield visit
        finally:
            del self._listener.visits[visit.host]

    def close(self) -> None:
        """Stop, wait for requests in flight, and free the port. Does nothing in a forked process."""
        if os.getpid() != self._pid:
            return
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()


def web_server() -> WebServer:
    """Return the server of this process. It starts at the first call and closes when the process ends."""
    return _server_of(os.getpid())


@functools.cache
def _server_of(pid: int) -> WebServer:
    server = WebServer()
    atexit.register(server.close)
    return server


class _Listener(socketserver.ThreadingTCPServer):
    request_queue_size = 128
    block_on_close = True
    daemon_threads = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.visits: dict[str, Visit] = {}
        super().__init__(address, handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_S
    wbufsize = -1  # buffer writes, so that the headers and the body are sent together
    server: _Listener

    def do_GET(self) -> None:
        self._answer("")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.send_error(413)
            return
        self._answer(self.rfile.read(int(length)).decode(errors="replace"))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: requests are part of the episode."""

    def _answer(self, body: str) -> None:
        visit = self.server.visits.get(self.headers.get("Host", ""))
        if visit is None:
            self.send_error(421)
            return
        parts = urllib.parse.urlsplit(self.path)
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
            request = Request(
                method=self.command,
                path=parts.path,
                query=dict(urllib.parse.parse_qsl(parts.query, max_num_fields=MAX_FIELDS)),
                form=dict(urllib.parse.parse_qsl(body, keep_blank_values=True, max_num_fields=MAX_FIELDS)),
                cookie=cookies[COOKIE].value if COOKIE in cookies else "",
            )
        except (CookieError, ValueError):
            self.send_error(400)
            return
        response = respond(visit.site, visit.state, request)
        visit.state = response.state
        content = response.body.encode()
        self.send_response(response.status)
        if response.location:
            self.send_header("Location", response.location)
        if response.cookie is not None:
            age = "" if response.cookie else "; Max-Age=0"
            self.send_header("Set-Cookie", f"{COOKIE}={response.cookie}; Path=/; HttpOnly; SameSite=Strict{age}")
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
