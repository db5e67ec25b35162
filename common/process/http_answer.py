"""Asks an HTTP server as urllib does, but follows no redirection and no proxy: either would ask another host."""

import http.client
import urllib.request

_OPENER = urllib.request.OpenerDirector()
_OPENER.add_handler(urllib.request.HTTPHandler())
_OPENER.add_handler(urllib.request.HTTPSHandler())


def answer_to(request: urllib.request.Request, *, timeout_s: float, max_bytes: int) -> tuple[int, bytes]:
    """The status of the answer, and its body: of one above `max_bytes`, the beginning and one byte too many.

    Raises OSError, and HTTPException for an answer that is malformed or ends too early.
    """
    with _OPENER.open(request, timeout=timeout_s) as answer:
        body = answer.read(max_bytes + 1)
        if answer.length and len(body) <= max_bytes:
            raise http.client.IncompleteRead(body, answer.length)
        return answer.status, body
