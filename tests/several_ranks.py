"""Calls a function of a test on several ranks, each a process: `python -m tests.several_ranks MODULE FUNCTION ...`."""

import importlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO

import torch

from slipstream.learner.ranks.ranks import join_ranks, leave_ranks
from tests.processes import POLL_S, REPOSITORY, started

TIMEOUT_S = 300.0  # of a collective


class SeveralRanks:
    """The processes of a function, which each get `Ranks` and the same arguments as text."""

    def __init__(self, function: Callable[..., None], *arguments: object, num_ranks: int) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        place = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = ["-m", "tests.several_ranks", function.__module__, function.__name__, *map(str, arguments)]
        self._outputs: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(num_ranks)]  # noqa: SIM115 - see `wait`
        here = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
        self._processes = [
            started([sys.executable, *command], output, cwd=REPOSITORY, env={**here, "RANK": str(rank)})
            for rank, output in enumerate(self._outputs)
        ]

    @property
    def running(self) -> bool:
        """Whether all have neither ended nor failed."""
        codes = [process.poll() for process in self._processes]
        return None in codes and not any(codes)

    def wait(self) -> None:
        """Wait for the end of all. If one fails, all are killed; then AssertionError is raised, with what all wrote.

        When one has failed, the others soon fail too, as they lose their connection to it.
        """
        try:
            while self.running:
                time.sleep(POLL_S)
        finally:
            failed = any(process.returncode for process in self._processes)
            wrote = []
            for process, output in zip(self._processes, self._outputs, strict=True):
                process.kill()
                process.wait()
                output.seek(0)
                wrote.append(output.read().decode(errors="replace"))
                output.close()
        assert not failed, "\n".join(wrote)


def main(module: str, function: str, *arguments: str) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    getattr(importlib.import_module(module), function)(join_ranks(timeout_s=TIMEOUT_S), *arguments)
    leave_ranks()
    os._exit(0)  # as tools/cli/cli.py ends a rank, and for its reason


if __name__ == "__main__":
    main(*sys.argv[1:])
