"""Debian's Chromium in bubblewrap, controlled over a pipe by Playwright.

Chromium sees /usr and fonts, read only, the pages to show, and a home in memory. It has no network, not even the host's
loopback, unless sites are named. Then it has the host's network, and requests to other sites go to a proxy that does
not exist. Its processes end with the process that started it. Root starts it as the user with id 65534, because
Chromium cannot use its own sandbox as root.
"""

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

CHROMIUM = "/usr/lib/chromium/chromium"
PAGES = "/pages"  # the path of the pages in bubblewrap
TMPFS_BYTES = 256 << 20
UNPRIVILEGED_ID = 65534  # the user id of Debian's user for processes without privileges

_HOME = "/home/agent"
_NEEDED = ((CHROMIUM, "chromium"), ("bwrap", "bubblewrap"))
# Playwright passes --no-sandbox, which would switch Chromium's own sandbox off.
_KEEP_SANDBOX = 'for given; do shift; [ "$given" = --no-sandbox ] || set -- "$@" "$given"; done\n'
_UNPRIVILEGED = ["setpriv", f"--reuid={UNPRIVILEGED_ID}", f"--regid={UNPRIVILEGED_ID}", "--clear-groups"]
_NAMES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates")
_MISSING_PROXY = "http://127.0.0.1:9"  # nothing listens there, so requests to other sites fail


def require_chromium() -> None:
    """Raise ValueError, with the command to install it, if Chromium or bubblewrap is missing."""
    for program, package in _NEEDED:
        if shutil.which(program) is None:
            raise ValueError(
                f"this environment shows pages in Debian's Chromium, in bubblewrap, and {program} is missing; install "
                f"it: apt-get install {package}"
            )


def require_readable(pages: Path) -> None:
    """Raise ValueError if root's Chromium, which runs as user 65534, could not read `pages`."""
    if os.geteuid() == 0 and not all(folder.stat().st_mode & 0o001 for folder in (pages, *pages.parents)):
        raise ValueError(
            f"root runs Chromium as the user with id {UNPRIVILEGED_ID}, which cannot read {pages}: install the "
            "environment in a folder that all users may enter, or run as another user"
        )


def write_launcher(path: Path, *, pages: Path | None, sites: Sequence[str]) -> None:
    """Write a program that starts Chromium in bubblewrap, with `pages` at /pages; it can reach only `sites`.

    A site is a host, or host:port, as in Chromium's --proxy-bypass-list.
    """
    start = [*(_UNPRIVILEGED if os.geteuid() == 0 else []), *_bubblewrap(pages, has_network=bool(sites)), CHROMIUM]
    flags = ["--disable-breakpad", "--disable-component-update", "--disable-domain-reliability", "--no-pings"]
    if sites:
        flags += [f"--proxy-server={_MISSING_PROXY}", f"--proxy-bypass-list={';'.join(('<-loopback>', *sites))}"]
    path.write_text(f'#!/bin/sh\n{_KEEP_SANDBOX}exec {shlex.join([*start, *flags])} "$@"\n')
    path.chmod(0o755)


def _bubblewrap(pages: Path | None, *, has_network: bool) -> list[str]:
    arguments = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--clearenv"]
    arguments += ["--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--hostname", "sandbox"]
    arguments += ["--ro-bind", "/usr", "/usr", "--tmpfs", "/usr/local"]
    for name in ("bin", "lib", "lib64", "sbin"):
        arguments += ["--symlink", f"usr/{name}", f"/{name}"]
    for path in ("/etc/fonts", "/etc/alternatives", *(_NAMES if has_network else ())):
        arguments += ["--ro-bind-try", path, path]
    arguments += ["--share-net"] if has_network else []
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/tmp", _HOME):
        arguments += ["--size", str(TMPFS_BYTES), "--tmpfs", path]
    arguments += ["--ro-bind", str(pages), PAGES] if pages else []
    return [*arguments, "--chdir", "/", "--setenv", "HOME", _HOME, "--setenv", "PATH", "/usr/bin:/bin"]
