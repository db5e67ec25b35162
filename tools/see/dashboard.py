"""A short link to TensorBoard that opens on the charts which matter most."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from slipstream.learner.lead.overview import pinned_link


def redirect_to_charts(address: str, *, port: int) -> str:
    """Redirect a browser to the most telling charts of the TensorBoard at `address`; return the link, on loopback."""

    class Redirect(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", pinned_link(address))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """No line for each request."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Redirect)
    threading.Thread(target=server.serve_forever, name="dashboard", daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"
