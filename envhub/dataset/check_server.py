"""The process in which checks run that a reply could make endless: mathematics, and JSON schemas.

`python -m slipstream.envhub.dataset.check_server SOCKET PARENT_PID`. Each comparison is a fork, with limits of CPU time
and memory that the kernel enforces: a comparison that exceeds them ends without an answer. The timeouts of math-verify
are signals, which work in a main thread only and stop no computation in C, so they are off.
"""

import json
import os
import re
import resource
import socketserver
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec

CPU_S = 2  # of one comparison
MEMORY_BYTES = 2 << 30  # of address space
MAX_FORKS = 32  # at a time
_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
POLL_S = 0.2  # how often the server looks for ended forks, and whether its parent still lives


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    check: str  # a name in `COMPARISONS`
    reply: str
    answer: Any


class Response(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    score: float = 0.0
    fault: str = ""  # why `answer` is not one that the check can compare with


def mathematics(reply: str, answer: Any) -> float:
    """1 if the reply's last expression equals the answer's. Raises ValueError if the answer contains none."""
    from math_verify import parse, verify

    wanted = parse(marked(str(answer)), parsing_timeout=None)
    if not wanted:
        raise ValueError(f"the answer {answer!r} contains no mathematics")
    return float(verify(wanted, parse(reply, parsing_timeout=None), timeout_seconds=None))


def marked(answer: str) -> str:
    r"""The answer as LaTeX that math-verify finds whole: `\frac{1}{2}` becomes `\boxed{\frac{1}{2}}`."""
    has_mark = any(mark in answer for mark in ("$", r"\boxed", r"\(", r"\["))
    return answer if has_mark else rf"\boxed{{{answer}}}"


def schema(reply: str, answer: Any) -> float:
    """1 if the reply is JSON that the schema `answer` accepts. References to other documents are never fetched."""
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        value = json_in(reply)
    except ValueError:
        return 0.0
    validator = validator_for(answer)(answer, registry=Registry())
    return float(validator.is_valid(value))


def json_in(reply: str) -> Any:
    """Return the value of the first block ```json ... ```, or of the whole reply. Raises ValueError without JSON."""
    block = _BLOCK.search(reply)
    try:
        return json.loads(block[1] if block else reply)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


COMPARISONS = {"math": mathematics, "schema": schema}


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        """Answer one request, in a fork of its own."""
        request = msgspec.json.decode(self.rfile.readline(), type=Request)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
        try:
            response = Response(score=COMPARISONS[request.check](request.reply, request.answer))
        except ValueError as error:
            response = Response(fault=str(error))
        except (MemoryError, RecursionError):
            response = Response()
        self.wfile.write(msgspec.json.encode(response) + b"\n")


class _Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = MAX_FORKS
    request_queue_size = 1024

    def __init__(self, path: str, *, parent: int) -> None:
        super().__init__(path, _Handler)
        self._parent = parent

    def service_actions(self) -> None:
        """Collect ended forks, and end with the parent."""
        super().service_actions()
        if os.getppid() != self._parent:
            sys.exit()


def main() -> NoReturn:
    import jsonschema  # noqa: F401  imported before the first fork, which then need not do it
    import math_verify
    import referencing  # noqa: F401

    path, parent = sys.argv[1:]
    math_verify.verify(*(math_verify.parse(r"\boxed{x+1}", parsing_timeout=None),) * 2, timeout_seconds=None)
    with _Server(f"{path}.new", parent=int(parent)) as server:
        Path(f"{path}.new").rename(path)  # a client that sees `path` can connect
        server.serve_forever(poll_interval=POLL_S)
    sys.exit()


if __name__ == "__main__":
    main()
