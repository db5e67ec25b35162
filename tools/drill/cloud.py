"""A stand-in for AWS's metadata service: it hands out tokens, and notices of preemption."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Cloud:
    """Serves `notice` to any process that asks; an empty one counts as none."""

    def __init__(self) -> None:
        self.notice = ""  # JSON
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._say(200, "token")

            def do_GET(self) -> None:
                is_there = cloud.notice and self.path.endswith("/spot/instance-action")
                self._say(*((200, cloud.notice) if is_there else (404, "")))

            def _say(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="cloud", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
