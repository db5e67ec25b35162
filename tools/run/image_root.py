"""`make image-root`: run the very steps of the Dockerfile in a clean Debian root, without a container engine.

The root is made by mmdebstrap, and the steps run in a chroot; both need root's rights. It differs from the image in its
base: Debian's own Python 3.11 instead of that of the image `python:3.11-slim-bookworm`.
"""

import argparse
import os
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BASE = "python:3.11-slim-bookworm"
SUITE, PACKAGES = "bookworm", "ca-certificates,python3.11,python3.11-venv"
KNOWN = ("FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "CMD")
# How this machine reaches its package index; an image has its own way.
OF_THE_HOST = ("PIP_INDEX_URL", "PIP_CERT", "PIP_RETRIES", "SSL_CERT_FILE", "http_proxy", "https_proxy", "no_proxy")
HOST_FILES = ("/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True, slots=True)
class Step:
    word: str  # RUN, COPY, ...
    text: str


def read_steps(text: str) -> list[Step]:
    """The steps of a Dockerfile. Raises ValueError for one that this program does not know."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    steps = []
    for line in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word not in KNOWN:
            raise ValueError(f"the Dockerfile has the step {word!r}; known are {', '.join(KNOWN)}")
        steps.append(Step(word, rest.strip()))
    if not steps or steps[0] != Step("FROM", BASE):
        raise ValueError(f"the Dockerfile must begin with `FROM {BASE}`, for which a Debian root is made here")
    return steps


class Root:
    """A Debian root in which steps run one after another."""

    def __init__(self, path: Path, arguments: Mapping[str, str]) -> None:
        """`arguments` are those of --build-arg."""
        self._path = path
        self._arguments = arguments
        self._folder = "/"
        self.variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

    def run(self, step: Step) -> None:
        """Run one step. Raises subprocess.CalledProcessError."""
        print(f"$ {step.word} {step.text}", flush=True)
        match step.word:
            case "ARG":
                name, _, default = step.text.partition("=")
                self.variables[name] = self._arguments.get(name, default)
            case "ENV":
                for setting in step.text.split():
                    name, _, value = setting.partition("=")
                    self.variables[name] = string.Template(value).safe_substitute(self.variables)
            case "WORKDIR":
                self._folder = step.text
                self._inside(step.text).mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(step.text)
            case "RUN":
                self.shell(step.text)

    def shell(self, command: str) -> None:
        """Run a shell's command inside, with this machine's /proc and /dev. Raises subprocess.CalledProcessError."""
        root, given = str(self._path), {name: os.environ[name] for name in OF_THE_HOST if name in os.environ}
        inside = (
            'mount --rbind /proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" /bin/sh -c "cd $1 && $2"'
        )
        subprocess.run(
            ["unshare", "--mount", "/bin/sh", "-c", inside, root, self._folder, command],
            env=given | self.variables | {"HOME": "/root"},
            check=True,
        )

    def _copy(self, text: str) -> None:
        """`COPY . .`: the files that git tracks, as .dockerignore leaves out what it ignores."""
        if text != ". .":
            raise ValueError(f"only `COPY . .` is known, got {text!r}")
        names = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            target = self._inside(self._folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, target, follow_symlinks=False)

    def _inside(self, path: str) -> Path:
        return self._path / path.lstrip("/")


def make_root(path: Path) -> None:
    """Make a clean Debian with Python, and the files by which this machine reaches its package index."""
    subprocess.run(["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(path)], check=True)
    for name in HOST_FILES:
        if Path(name).exists():
            shutil.copy2(name, path / name.lstrip("/"))


def main(arguments: Sequence[str]) -> int:
    """Make the root, run all steps, and then what the image would run; return the exit code."""
    parser = argparse.ArgumentParser(prog="image_root", description=__doc__)
    parser.add_argument("root", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as of docker build")
    options = parser.parse_args(arguments)
    missing = [name for name in ("mmdebstrap", "chroot", "unshare") if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        print(
            f"image_root: needs root's rights, and {', '.join(missing) or 'nothing else'}; install them",
            file=sys.stderr,
        )
        return 2
    steps = read_steps(Path("Dockerfile").read_text())
    if options.root.exists():
        print(f"image_root: {options.root} exists; name a new folder, or remove it", file=sys.stderr)
        return 2
    make_root(options.root)
    root = Root(options.root, dict(setting.split("=", 1) for setting in options.build_arg))
    for step in steps[1:]:
        root.run(step)
    root.shell("slipstream --help > /dev/null && slipstream doctor")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
