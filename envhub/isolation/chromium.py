"""Debian's Chromium in bubblewrap, for whoever drives it over a pipe: chromedriver, or Playwright.

Inside are /usr and fonts, read only, the pages that are to be shown, and a home in memory. There is no network, not
even the host's loopback, unless sites are named; then it is the host's, and requests to anything else go to a proxy
that is not there. Chromium's processes end with whoever started it. A host that runs as root becomes nobody first, and
Chromium keeps its own sandbox, which it has to do without where it is root.
"""

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

CHROMIUM, CHROMEDRIVER = "/usr/lib/chromium/chromium", "/usr/bin/chromedriver"
PAGES = "/pages"  # where the pages are inside
TMPFS_BYTES = 256 << 20

_HOME = "/home/agent"
_NEEDED = ((CHROMIUM, "chromium"), (CHROMEDRIVER, "chromium-driver"), ("bwrap", "bubblewrap"))
# Playwright would switch Chromium's own sandbox off.
_KEEP_SANDBOX = 'for given; do shift; [ "$given" = --no-sandbox ] || set -- "$@" "$given"; done\n'
_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
_NAMES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates")
_NO_PROXY_THERE = "http://127.0.0.1:9"


def require_chromium() -> None:
    """Raise ValueError, with what to install, where Chromium, its driver or bubblewrap is missing."""
    for program, package in _NEEDED:
        if shutil.which(program) is None:
            raise ValueError(
                f"this environment shows pages in Debian's Chromium, in bubblewrap, and {program} is missing: "
                f"apt-get install {package}; it never runs without"
            )


def require_readable(pages: Path) -> None:
    """Raise ValueError where root's Chromium, which runs as nobody, could not read `pages`."""
    if os.geteuid() == 0 and not all(folder.stat().st_mode & 0o001 for folder in (pages, *pages.parents)):
        raise ValueError(
            f"root runs Chromium as nobody, who cannot read {pages}: install the environment in a folder that "
            "everybody may enter, or run as another user"
        )


def write_launcher(path: Path, *, pages: Path | None, sites: Sequence[str]) -> None:
    """Write the program that is started in Chromium's place: with `pages` at /pages, and `sites` the only ones reached.

    A site is as Chromium's --proxy-bypass-list has it: a host, or host:port.
    """
    start = [*(_NOBODY if os.geteuid() == 0 else []), *_bubblewrap(pages, has_network=bool(sites)), CHROMIUM]
    flags = ["--disable-breakpad", "--disable-component-update", "--disable-domain-reliability", "--no-pings"]
    if sites:
        flags += [f"--proxy-server={_NO_PROXY_THERE}", f"--proxy-bypass-list={';'.join(('<-loopback>', *sites))}"]
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
