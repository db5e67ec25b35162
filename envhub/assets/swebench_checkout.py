"""Check out the repository of an instance as it was before the repair: a git repository with one commit, on disk.

It is fetched from the user's clone without earlier and later commits, so that a policy cannot read the repair. It is
made once, and later runs use it again. Policies see it read only, and work on layers over it.
"""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.envhub.assets.swebench_instance import Playable
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.file_tree import Node, Tree
from slipstream.envhub.isolation.layer import whiteout
from slipstream.envhub.swe.git import PLAIN_INDEX

# A clone may belong to another user, and the commit need not be the head of a branch.
_UPLOAD_PACK = "git -c safe.directory=* -c uploadpack.allowAnySHA1InWant=true upload-pack"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkout:
    folder: Path
    commit: str  # the full hash
    commit_time: int  # s since 1970
    tests: Tree  # the layer of the test patch
    repaired: Tree  # the layer of the real repair


@functools.lru_cache(maxsize=4096)
def check_out(playable: Playable, checkouts: Path) -> Checkout:
    """Return the checkout of an instance in the folder `checkouts`, and make it if needed. Blocks for some seconds.

    Raises EnvError if git fails: the clone lacks the commit, or a patch does not apply.
    """
    instance = playable.instance
    folder = checkouts / instance.instance_id
    if not folder.is_dir():
        _make(playable, folder)
    commit, time = _git("show", "-s", "--format=%H %ct", "HEAD", folder=folder).split()
    return Checkout(
        folder=folder,
        commit=commit.decode(),
        commit_time=int(time),
        tests=_patched(folder, instance.test_patch),
        repaired=_patched(folder, instance.patch),
    )


def _make(playable: Playable, folder: Path) -> None:
    """Make the checkout in a temporary folder and then rename it, so that two processes can do this at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / "repository"
        made.mkdir(mode=0o755)
        commit = playable.instance.base_commit
        _git("init", "-q", "--template=", "--initial-branch=main", folder=made)
        source = str(playable.clone.resolve())
        try:
            _git("fetch", "-q", "--depth=1", "--no-tags", f"--upload-pack={_UPLOAD_PACK}", source, commit, folder=made)
        except EnvError as error:
            raise EnvError(f"{source} lacks the commit {commit}; run git fetch --all in it; {error}") from error
        _git("reset", "-q", "--hard", "FETCH_HEAD", folder=made)
        (made / ".git/FETCH_HEAD").unlink()
        if playable.built is not None:
            but_git = shutil.ignore_patterns(".git")
            shutil.copytree(playable.built, made, symlinks=True, dirs_exist_ok=True, ignore=but_git)
        _run(["/bin/sh", "-c", PLAIN_INDEX.replace("/tmp/", "../")], folder=made)
        time = int(_git("show", "-s", "--format=%ct", "HEAD", folder=made))
        for path in made.rglob("*"):
            os.utime(path, (time, time), follow_symlinks=False)
        try:
            made.rename(folder)
        except OSError as error:
            if not folder.is_dir():
                raise EnvError(f"could not create {folder}: {error}") from error


def _patched(folder: Path, patch: str) -> Tree:
    """Return the changes of `patch` to the commit as a layer."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "objects").mkdir()
        settings = {
            "GIT_INDEX_FILE": f"{scratch}/index",
            "GIT_OBJECT_DIRECTORY": f"{scratch}/objects",
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(folder.resolve() / ".git/objects"),
        }
        _git("read-tree", "HEAD", folder=folder, settings=settings)
        _git("apply", "--cached", "--whitespace=nowarn", "-", folder=folder, settings=settings, stdin=patch.encode())
        raw = _git("diff-index", "--cached", "--no-renames", "-z", "HEAD", folder=folder, settings=settings)
        fields = raw.decode(errors="surrogateescape").split("\0")[:-1]
        layer: Tree = {}
        for change, path in zip(fields[::2], fields[1::2], strict=True):  # `:MODE MODE SHA SHA LETTER`, then the path
            _, mode, _, blob, letter = change.split(" ")
            if letter == "D":
                layer[whiteout(path)] = Node(kind="file")
                continue
            content = _git("cat-file", "blob", blob, folder=folder, settings=settings)
            kind, bits = ("link", 0o777) if mode == "120000" else ("file", int(mode, 8) & 0o777)
            layer[path] = Node(kind=kind, content=content, mode=bits)
    return layer


def _git(*arguments: str, folder: Path, settings: dict[str, str] | None = None, stdin: bytes = b"") -> bytes:
    command = ["git", "-c", "safe.directory=*", "-c", "core.autocrlf=false", *arguments]
    return _run(command, folder=folder, settings=settings, stdin=stdin)


def _run(command: Sequence[str], *, folder: Path, settings: dict[str, str] | None = None, stdin: bytes = b"") -> bytes:
    """Run `command` without the current user's git settings and hooks, and return its stdout. Raises EnvError."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "HOME": "/nonexistent"}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"}
    done = subprocess.run(
        command, cwd=folder, env=environment | (settings or {}), input=stdin, capture_output=True, umask=0o022
    )
    if done.returncode != 0:
        stderr = done.stderr.decode(errors="replace").strip()[-500:]
        raise EnvError(f"{' '.join(command)[:300]} in {folder} failed, exit code {done.returncode}: {stderr}")
    return done.stdout
