"""Asks the check server of this process, which is started with the first question."""

import atexit
import contextvars
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.message import valid_text
from slipstream.envhub.dataset.check_server import Request, Response
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.own_thread import in_own_thread
from slipstream.envhub.step_deadline import left_s

START_S = 60.0  # the server imports sympy
# Many times the CPU time of a comparison, as a busy machine must not turn a right reply into a wrong one.
ANSWER_S = 60.0
MAX_RESPONSE_BYTES = 1 << 16

_lock = threading.Lock()
_server: tuple[subprocess.Popen[bytes], Path] | None = None


async def compared(check: str, reply: str, answer: Any) -> float:
    """Return the score of `reply`; 0 if it takes more time or memory than a comparison may.

    Raises ValueError if the check cannot compare anything with `answer`, and EnvError if the server does not answer.
    """
    ask_it = partial(ask, check, reply, answer, timeout_s=min(ANSWER_S, 0.9 * left_s()))
    return await in_own_thread("a check", ask_it)


def ask(check: str, reply: str, answer: Any, *, timeout_s: float = ANSWER_S) -> float:
    """As `compared`. It blocks."""
    text = valid_text(reply)
    request = msgspec.json.encode(Request(check=check, reply=text, answer=answer)) + b"\n"
    path = _server_path()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(max(timeout_s, 0.1))
            connection.connect(str(path))
            connection.sendall(request)
            line = connection.makefile("rb").readline(MAX_RESPONSE_BYTES)
    except ConnectionResetError:
        line = b""  # ended at a limit, before it had read everything
    except OSError as error:
        raise EnvError(f"the check {check} gave no answer within {timeout_s:.0f} s: {error}") from error
    if not line:
        return 0.0
    try:
        response = msgspec.json.decode(line, type=Response)
    except MALFORMED as error:
        raise EnvError(f"the check {check} gave a malformed answer: {error}") from error
    if response.fault:
        raise ValueError(response.fault[:500])
    return response.score


def _server_path() -> Path:
    """The socket of a server that accepts connections. It starts one if none is running. Raises EnvError."""
    global _server
    with _lock:
        if _server is None or _server[0].poll() is not None:
            # In an empty context: it belongs to no episode, as episodes share it.
            _server = contextvars.Context().run(_started)
        return _server[1]


def _started() -> tuple[subprocess.Popen[bytes], Path]:
    folder = Path(tempfile.mkdtemp(prefix="slipstream-checks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path, log = folder / "socket", folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slipstream.envhub.dataset.check_server", path, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise EnvError(f"the process of checks did not start: {log.read_text(errors='replace')[-500:]}")
        time.sleep(0.02)
    return process, path
