"""A chat server on loopback that answers as a script says: with marks, errors, silence, garbage, or not at all."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from slipstream.envhub.rewards import attempts
from tests.http_stand_in import Asked, HttpStandIn
from tests.http_stand_in import Reply as Reply


def completion(text: str, *, total_tokens: int = 7) -> Reply:
    body = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": {"total_tokens": total_tokens}}
    return 200, {}, json.dumps(body).encode()


class ScriptedJudge(HttpStandIn):
    """Answers each request by `answer(request, number)`; None closes the connection. Counts what runs side by side."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Reply | None]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.num_open = self.most_open = 0
        self._answer, self._lock = answer, threading.Lock()
        super().__init__(self._judge)
        self.url += "/v1"

    def _judge(self, asked: Asked) -> Reply | None:
        request = json.loads(asked.body)
        with self._lock:
            self.requests.append(request)
            self.keys.append(asked.headers.get("Authorization"))
            number = len(self.requests) - 1
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        try:
            return self._answer(request, number)
        finally:  # before the reply is sent: the next request may come right after it
            with self._lock:
                self.num_open -= 1

    def answer_by(self, answer: Callable[[dict[str, Any], int], Reply | None]) -> None:
        self._answer = answer


Serve = Callable[[Callable[[dict[str, Any], int], Reply | None]], ScriptedJudge]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts scripted judges, which end with the test."""
    with ExitStack() as stack:
        yield lambda answer: stack.enter_context(ScriptedJudge(answer))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients retry soon, in every file that imports this."""
    monkeypatch.setattr(attempts, "FIRST_WAIT_S", 0.01)
