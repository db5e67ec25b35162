"""A cloud's metadata service on loopback: it gives the answers that a test puts there, and keeps what it was asked."""

import http
import time

from tests.http_stand_in import Asked, HttpStandIn, Reply


class MetadataService(HttpStandIn):
    """What has no answer is a 404."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}  # status and body, by path and query
        self.asked: list[tuple[str, str, dict[str, str]]] = []  # method, path and query, headers in lower case
        self.tokens: list[str] | None = None  # the valid tokens, newest last; None if no token is required
        self.delay_s = 0.0
        super().__init__(self._answer)

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]

    def wants_tokens(self) -> None:
        """From now on it is as IMDSv2: only a token that it gave, and has not forgotten, is answered."""
        self.tokens = []

    def _answer(self, request: Asked) -> Reply:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.method, request.path, headers))
        time.sleep(self.delay_s)
        status, body = self.answers.get(request.path, (404, "not found"))
        if self.tokens is not None:
            if request.path == "/latest/api/token":
                self.tokens.append(f"token-{len(self.asked)}")
                status, body = 200, self.tokens[-1]
            elif headers.get("x-aws-ec2-metadata-token") not in self.tokens:
                status, body = 401, "unauthorized"
        return status, {"Location": body} if status == http.HTTPStatus.FOUND else {}, body.encode()
