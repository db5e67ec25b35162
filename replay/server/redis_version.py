"""The version of a Redis or Valkey server, and the error of one that does not run."""

import re
import subprocess
from typing import NamedTuple

VERSION_TIMEOUT_S = 20.0


class Version(NamedTuple):
    """The version of a server."""

    major: int
    minor: int
    patch: int
    product: str = "Redis"

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class ServerError(RuntimeError):
    """No server was found, or it did not start or stop; the message ends with its log, if it wrote one."""


def version_of(executable: str) -> Version:
    """The version of the program `executable`. Raises ServerError if it is no server that runs here."""
    try:
        done = subprocess.run([executable, "--version"], capture_output=True, timeout=VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"{executable} does not run: {error}; remove it from the PATH, or install it again") from None
    shown = done.stdout.decode(errors="replace")
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", shown)
    if match is None:
        raise ServerError(
            f"{executable} is neither Redis nor Valkey: --version printed {shown!r}; remove it from the PATH"
        )
    # The words tell them apart, not the file's name: Valkey is often installed as redis-server too.
    major, minor, patch = map(int, match.groups())
    return Version(major, minor, patch, "Valkey" if shown.lower().startswith("valkey") else "Redis")
