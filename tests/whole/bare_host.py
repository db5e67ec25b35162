"""A host of its own, by namespaces: it sees none of this machine's files but the programs, and its network is one line.

Its /tmp, home and working directory are empty. At the far end of the line is a namespace that stands for the internet:
there, the ports that the test links to the host are carried out through socket files. So the host can open connections
to those ports of its loopback, and nothing can connect to it. The line loses and delays packets
(`tests.whole.lossy_line`). `python -m tests.whole.bare_host ADDRESS LINKS [COMMAND]` is the first process on either
side.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import psutil
import pytest

from tests.link import Link
from tests.processes import REPOSITORY, started
from tests.whole.lossy_line import FAR, NEAR, TUN, LossyLine, hand_over

POLL_S = 0.05
HOME = "/tmp/home"

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Onward = Callable[[Path], Awaitable[Stream]]
"""Connects to what a socket file stands for."""


class BareHost:
    """Runs one shell command on a host of its own, at the end of a line that may be cut at any time."""

    def __init__(self, name: str, root: Path, *, hidden: Path, variables: Mapping[str, str], seed: int) -> None:
        """`hidden` is the learner's folder, which must look empty from inside."""
        self.name = name
        self._hidden = hidden
        self._folder = root / name
        self.links = self._folder / "links"
        self.links.mkdir(parents=True)
        self.line = LossyLine(self.links, seed=seed)
        self._variables = variables
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._stack.enter_context(self.line)
        self._stack.callback(_end, self._run(FAR))
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            _end(self._process)
        self._stack.close()

    def link(self, port: int) -> None:
        """Make 127.0.0.1:`port` of this machine the same address of that host."""
        self._stack.enter_context(Link(port, listen=self.links / f"{port}.sock"))

    def start(self, command: str) -> None:
        self._process = self._run(NEAR, command)

    def _run(self, address: str, *command: str) -> subprocess.Popen[bytes]:
        """Start one side in its own namespaces; it may change the network of its own namespace only."""
        sandbox = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
        sandbox += ["--hostname", self.name, "--cap-add", "CAP_NET_ADMIN"]
        files = ["--ro-bind", "/", "/", "--dev", "/dev", "--dev-bind", str(TUN), str(TUN)]
        files += ["--proc", "/proc", "--tmpfs", "/tmp"]
        if not self._hidden.is_relative_to("/tmp"):
            files += ["--tmpfs", str(self._hidden)]
        for needed in (REPOSITORY, Path(sys.prefix)):  # these may be below /tmp
            files += ["--ro-bind", str(needed), str(needed)]
        files += ["--bind", str(self.links), "/tmp/links", "--dir", HOME, "--chdir", HOME]
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {"PATH": programs, "HOME": HOME, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        given = [word for name, value in {**variables, **self._variables}.items() for word in ("--setenv", name, value)]
        inside = [sys.executable, "-m", "tests.whole.bare_host", address, "/tmp/links", *command]
        with (self._folder / "output").open("ab") as output:
            return started([*sandbox, *files, *given, *inside], output)

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
                if any(word.endswith(("/bin/slipstream", "tests.actors.scripted_actor")) for word in process.cmdline()):
                    return process
        raise LookupError(f"its command does not run on {self.name}:\n{self.said()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # bwrap: the kernel ends all that runs in its namespace
    process.wait()


# --- Inside.


async def _live(links: Path, command: str) -> int:
    """On the host: run `command`, with the links open on loopback; return its exit code."""
    opening = asyncio.create_task(
        _open_links(links, "127.0.0.1", lambda path: asyncio.open_connection(FAR, int(path.stem)))  # over the line
    )
    process = await asyncio.create_subprocess_shell(command)
    code = await process.wait()
    opening.cancel()
    return code


async def _open_links(links: Path, address: str, onward: Onward) -> None:
    opened: set[Path] = set()
    while True:
        for path in set(links.glob("*.sock")) - opened:  # noqa: ASYNC240 - a folder in memory
            await asyncio.start_server(partial(_connected, onward, path), address, int(path.stem))
            opened.add(path)
        await asyncio.sleep(POLL_S)


async def _connected(onward: Onward, path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        back, forth = await onward(path)
    except OSError:  # the line is cut
        writer.close()
        return
    await asyncio.gather(_pump(reader, forth), _pump(back, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    writer.close()


def main(address: str, folder: str, *command: str) -> int:
    """Live on one side of the line until the command has ended, or, at the far end, for ever."""
    links = Path(folder)
    hand_over(links, address)
    if not command:
        asyncio.run(_open_links(links, FAR, asyncio.open_unix_connection))  # out of the namespace
    return asyncio.run(_live(links, *command))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
