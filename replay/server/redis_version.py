"""The version of a Redis or Valkey server."""

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


class NoRedis(ValueError):
    """A program on the PATH that is no Redis or Valkey server that runs here; the message names it."""


def version_of(executable: str) -> Version:
    """The version of the program `executable`. Raises NoRedis."""
    try:
        done = subprocess.run([executable, "--version"], capture_output=True, timeout=VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoRedis(f"{executable} does not run: {error}; remove it from the PATH, or install it again") from None
    shown = done.stdout.decode(errors="replace")
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", shown)
    if match is None:
        raise NoRedis(f"{executable} is neither Redis nor Valkey: --version printed {shown!r}; remove it from the PATH")
    # The words tell them apart, not the file's name: Valkey is often installed as redis-server too.
    major, minor, patch = map(int, match.groups())
    return Version(major, minor, patch, "Valkey" if shown.lower().startswith("valkey") else "Redis")
