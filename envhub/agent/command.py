"""Runs an agent that is a command, in the sandbox. The only thing that it can reach is the endpoint of its episode."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.envhub.agent import forward
from slipstream.envhub.agent.endpoint import Endpoint
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.file_tree import file
from slipstream.envhub.isolation.sandbox import Limits, run_in_sandbox

FOLDER = "/opt/agent"
ENDPOINT = str(Path(forward.ENDPOINT).parent)
PROGRAM = Path(forward.__file__)
MAX_TASK_CHARS = 100_000  # an environment variable has at most 128 KiB
MAX_SHOWN_CHARS = 2000
# The episode's own time limit ends a command; these limits keep it from taking the machine.
LIMITS = Limits(
    wall_s=1e6,
    cpu_s=3600,
    memory_bytes=2 << 30,
    max_open_files=256,
    max_waiting=128,
    file_bytes=16 << 20,
    output_bytes=1 << 20,
)


async def run_command(words: Sequence[str], task: dict[str, Any], endpoint: Endpoint, *, folder: Path | None) -> None:
    """Run the command to its end. Raises EnvError unless it succeeds."""
    if len(json.dumps(task)) > MAX_TASK_CHARS:
        raise EnvError(f"the task has more than {MAX_TASK_CHARS} characters, too many for an environment variable")
    settings = {"command": list(words), "key": endpoint.key, "task": task}
    with _shared_folder() as shared:
        async with endpoint.listening(shared / Path(forward.ENDPOINT).name):
            finished = await run_in_sandbox(
                f"exec /usr/bin/python3 -I -S {ENDPOINT}/{PROGRAM.name}",
                {forward.SETTINGS: file(json.dumps(settings), 0o600)},
                limits=LIMITS,
                mounts={shared: ENDPOINT, **({} if folder is None else {folder: FOLDER})},
            )
    if finished.exit_code != 0:
        raise EnvError(f"the command ended with exit code {finished.exit_code}: {finished.output[-MAX_SHOWN_CHARS:]}")


@contextlib.contextmanager
def _shared_folder() -> Iterator[Path]:
    """A folder for the endpoint's socket and the program that forwards to it.

    The sandbox of an actor that is root runs as another user, so everyone may open it. The key protects the endpoint.
    """
    with tempfile.TemporaryDirectory(prefix="agent-") as name:
        shared = Path(name)
        shared.chmod(0o755)
        shutil.copy(PROGRAM, shared / PROGRAM.name)
        (shared / PROGRAM.name).chmod(0o644)
        yield shared
