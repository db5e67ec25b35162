"""A host of its own, by namespaces: it sees none of this machine's files but the programs, and no network.

Its /tmp, home and working directory are empty. Of the network it has loopback alone, and there the ports that the test
links to it: connections to those are carried out through socket files, so it can open connections, and nothing can
connect to it. `python -m tests.bare_host LINKS COMMAND` is its first process.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import psutil
import pytest

from common.shutdown import die_with_parent
from tests.processes import REPOSITORY
from tools.link import Link

POLL_S = 0.05
HOME = "/tmp/home"


class BareHost:
    """Runs one shell command on a host of its own. Its links may be delayed and cut at any time."""

    def __init__(self, name: str, root: Path, *, hidden: Path, variables: Mapping[str, str]) -> None:
        """`hidden` is the learner's folder, which must look empty from inside."""
        self.name = name
        self.links: dict[int, Link] = {}
        self._hidden = hidden
        self._folder = root / name
        self._sockets = self._folder / "links"
        self._sockets.mkdir(parents=True)
        self._variables = variables
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()  # bwrap: the kernel ends all that runs in its namespace
            self._process.wait()
        self._stack.close()

    def link(self, port: int) -> Link:
        """Make 127.0.0.1:`port` of this machine the same address of that host."""
        if port not in self.links:
            link = Link(port, listen=self._sockets / f"{port}.sock")
            self.links[port] = self._stack.enter_context(link)
        return self.links[port]

    def cut(self, is_cut: bool) -> None:
        for link in self.links.values():
            link.is_cut = is_cut

    def start(self, command: str) -> None:
        sandbox = [
            "bwrap",
            "--unshare-all",
            "--die-with-parent",
            "--new-session",
            "--hostname",
            self.name,
            "--clearenv",
        ]
        files = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
        if not self._hidden.is_relative_to("/tmp"):
            files += ["--tmpfs", str(self._hidden)]
        files += ["--bind", str(self._sockets), "/tmp/links", "--dir", HOME, "--chdir", HOME]
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {"PATH": programs, "HOME": HOME, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        given = [word for name, value in {**variables, **self._variables}.items() for word in ("--setenv", name, value)]
        inside = [sys.executable, "-m", "tests.bare_host", "/tmp/links", command]
        with (self._folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [*sandbox, *files, *given, *inside],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    def preempt(self) -> None:
        """Send SIGTERM to its command, as a cloud's agent does."""
        self._command().send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """The exit code of its command."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name} did not end within {timeout_s:.0f} s:\n{self.said()}")

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def said(self) -> str:
        return (self._folder / "output").read_text(errors="replace")

    def _command(self) -> psutil.Process:
        assert self._process is not None
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(word.endswith(("/slipstream", "tests.scripted_actor")) for word in process.cmdline()):
                    return process
        raise LookupError(f"its command does not run on {self.name}:\n{self.said()}")


# --- Inside.


async def _live(links: Path, command: str) -> int:
    """Run `command` with the links open; return its exit code."""
    opening = asyncio.create_task(_open_links(links))
    process = await asyncio.create_subprocess_shell(command)
    code = await process.wait()
    opening.cancel()
    return code


async def _open_links(links: Path) -> None:
    opened: set[Path] = set()
    while True:
        for path in set(links.glob("*.sock")) - opened:  # noqa: ASYNC240 - a folder in memory
            await asyncio.start_server(partial(_connected, path), "127.0.0.1", int(path.stem))
            opened.add(path)
        await asyncio.sleep(POLL_S)


async def _connected(path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    back, forth = await asyncio.open_unix_connection(path)
    await asyncio.gather(_pump(reader, forth), _pump(back, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(_live(Path(sys.argv[1]), sys.argv[2])))
