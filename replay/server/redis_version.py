"""The version of a Redis or Valkey server, and the known vulnerabilities that it may have.

    lacks(Version(6, 2, 14))          ->  ["CVE-2024-31449", "CVE-2024-46981", "CVE-2025-21605", ...]
    lacks(Version(9, 1, 2, "Valkey")) ->  []

A distribution may fix a vulnerability without changing the number, so a listed fix only "may" be missing.
"""

import re
import subprocess
from typing import NamedTuple

VERSION_TIMEOUT_S = 20.0


class Version(NamedTuple):
    """The version of a server. The numbers of Redis and of Valkey say nothing about each other."""

    major: int
    minor: int
    patch: int
    product: str = "Redis"

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class Fix(NamedTuple):
    """The fix of a vulnerability that a client can exploit, with the first fixed release of each maintained branch."""

    name: str
    closed_in: tuple[Version, ...]


def _version(numbers: str, product: str) -> Version:
    major, minor, patch = map(int, numbers.split("."))
    return Version(major, minor, patch, product)


def _fixes(product: str, releases: dict[str, str]) -> tuple[Fix, ...]:
    """The fixes of `product`, oldest first; `releases` has the first fixed ones of each."""
    return tuple(
        Fix(name, tuple(_version(numbers, product) for numbers in closed_in.split()))
        for name, closed_in in releases.items()
    )


REDIS_FIXES = _fixes(
    "Redis",
    {
        # A Lua library overflows the stack and may run code: github.com/redis/redis pull requests 13582, 13584.
        "CVE-2024-31449": "6.2.16 7.2.6 7.4.1",
        # Lua scripts may run code: release notes of 6.2.17; 7.4.2 by zkteco-home/redis-windows issue 84.
        "CVE-2024-46981": "6.2.17 7.4.2",
        # A client without a password can fill the memory: github.com/redis/redis pull request 13971; release notes of
        # 7.4.3.
        "CVE-2025-21605": "6.2.18 7.4.3",
        # HyperLogLog writes out of bounds: github.com/docker-library/official-images pull request 19401.
        "CVE-2025-32023": "6.2.19 7.2.10 7.4.5 8.0.3",
        # A Lua script may run code: github.com/docker-library/official-images pull request 20011.
        "CVE-2025-49844": "6.2.20 7.2.11 7.4.6 8.0.4 8.2.2",
        # A crafted RESTORE may run code: github.com/docker-library/official-images pull request 21922.
        "the security release of 24 July 2026": "6.2.23 7.2.15 7.4.10 8.2.8 8.4.5 8.6.5 8.8.1",
    },
)
# Where no other source is named: the release notes, the file 00-RELEASENOTES of each branch. What only a cluster, TLS,
# RDMA or a client's memory limit has is left out: a run's own server uses none of these.
VALKEY_FIXES = _fixes(
    "Valkey",
    {
        "CVE-2024-31449": "7.2.7 8.0.1",
        # 8.0.2 by openSUSE's valkey.changes of 8 January 2025; valkey.io dates 7.2.8 to the day before.
        "CVE-2024-46981": "7.2.8 8.0.2",
        # github.com/valkey-io/valkey pull requests 1992 to 1994, for three branches on the day of these releases.
        "CVE-2025-21605": "7.2.9 8.0.3 8.1.1",
        # github.com/valkey-io/valkey pull request 2314, on the day of these releases.
        "CVE-2025-32023": "7.2.10 8.0.4 8.1.3",
        "CVE-2025-49844": "7.2.11 8.0.6 8.1.4",
        # A crafted RESTORE: github.com/valkey-io/valkey pull requests 3631 to 3635.
        "CVE-2026-25243": "7.2.13 8.0.8 8.1.7 9.0.4",
        # A crafted stream in RESTORE may run code; 9.1.2 is the first without GHSA-fq2f-crmw-q97r too, by which a
        # client without a password can crash the Lua interpreter.
        "CVE-2026-63639": "7.2.14 8.0.10 8.1.9 9.0.5 9.1.2",
    },
)
FIXES = {"Redis": REDIS_FIXES, "Valkey": VALKEY_FIXES}


class NoRedis(ValueError):
    """A program on the PATH that is no Redis or Valkey server that runs here; the message names it."""


def version_of(executable: str) -> Version:
    """The version of the program `executable`. Raises NoRedis."""
    try:
        done = subprocess.run([executable, "--version"], capture_output=True, timeout=VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoRedis(f"{executable} does not run: {error}; remove it from the PATH, or install it again") from None
    shown = done.stdout.decode(errors="replace")
    match = re.search(r"v=(\d+\.\d+\.\d+)", shown)
    if match is None:
        raise NoRedis(f"{executable} is neither Redis nor Valkey: --version printed {shown!r}; remove it from the PATH")
    # The words tell them apart, not the file's name: Valkey is often installed as redis-server too.
    return _version(match[1], "Valkey" if shown.lower().startswith("valkey") else "Redis")


def lacks(version: Version) -> list[str]:
    """The fixes that a server of this version may lack, oldest first.

    A branch that is not listed in a fix no longer gets fixes, or was never affected: only the last fix counts there.
    """
    fixes = FIXES[version.product]
    return [fix.name for fix in fixes if not _has(version, fix, is_last=fix is fixes[-1])]


def _has(version: Version, fix: Fix, *, is_last: bool) -> bool:
    for closed in fix.closed_in:
        if closed[:2] == version[:2]:
            return version.patch >= closed.patch
    return not is_last or version > fix.closed_in[-1]


def warning_of(executable: str) -> str:
    """A warning about the fixes that this server may lack; "" if it has all of them."""
    version = version_of(executable)
    missing = lacks(version)
    if not missing:
        return ""
    newest = " or ".join(f"{name} {', '.join(map(str, fixes[-1].closed_in))}" for name, fixes in FIXES.items())
    return (
        f"{executable} is {version.product} {version}, which may lack the fixes of {', '.join(missing)}; put {newest}, "
        "or a newer one, on the PATH, or set redis.url to a server that has them. Until then, allow only trusted users "
        "on this machine"
    )
