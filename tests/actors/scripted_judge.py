"""A chat server on loopback that answers as a script says: with marks, errors, silence, garbage, or not at all."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slipstream.envhub.rewards import attempts

Reply = tuple[int, dict[str, str], bytes]  # status, headers, body


def completion(text: str, *, total_tokens: int = 7) -> Reply:
    body = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": {"total_tokens": total_tokens}}
    return 200, {}, json.dumps(body).encode()


class ScriptedJudge:
    """Answers each request by `answer(request, number)`; None closes the connection. Counts what runs side by side."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Reply | None]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.num_open = self.most_open = 0
        self._answer, self._lock = answer, threading.Lock()
        judge = self

        class Endpoint(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with judge._lock:
                    judge.requests.append(request)
                    judge.keys.append(self.headers.get("Authorization"))
                    number = len(judge.requests) - 1
                    judge.num_open += 1
                    judge.most_open = max(judge.most_open, judge.num_open)
                with contextlib.suppress(OSError):  # the client has gone
                    try:
                        reply = judge._answer(request, number)
                    finally:  # before the reply is sent: the next request may come right after it
                        with judge._lock:
                            judge.num_open -= 1
                    self._reply(reply)

            def _reply(self, reply: Reply | None) -> None:
                if reply is None:
                    self.close_connection = True
                    self.connection.close()
                    return
                status, headers, body = reply
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def answer_by(self, answer: Callable[[dict[str, Any], int], Reply | None]) -> None:
        self._answer = answer

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


Serve = Callable[[Callable[[dict[str, Any], int], Reply | None]], ScriptedJudge]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts scripted judges, which end with the test."""
    started = list[ScriptedJudge]()

    def start(answer: Callable[[dict[str, Any], int], Reply | None]) -> ScriptedJudge:
        started.append(ScriptedJudge(answer))
        return started[-1]

    yield start
    for judge in started:
        judge.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients retry soon, in every file that imports this."""
    monkeypatch.setattr(attempts, "FIRST_WAIT_S", 0.01)
