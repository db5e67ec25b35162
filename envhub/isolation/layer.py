"""What a tree of files has other than a folder: laid over the folder before a command, peeled off it afterwards.

A layer is written as those of container images are (OCI image layer specification): the files that are new or changed,
and an empty file `.wh.NAME` for each NAME that is gone. The modes of folders that the base has are not part of it.

The sandbox runs this file on the system's own Python, twice for each command and over thousands of files: it imports
little, and nothing that does not come with Python.
"""
# pathlib takes as long to import as all else here takes to run, and much longer for each file.
# ruff: noqa: PTH106, PTH107, PTH115, PTH118, PTH123, PTH208

import os
import posixpath
import stat
import subprocess
import sys

GONE = ".wh."
CHUNK_BYTES = 1 << 20


def gone(path: str) -> str:
    """The path in a layer that says that `path` is not there."""
    folder, name = posixpath.split(path)
    return posixpath.join(folder, GONE + name)


def lay(base: str, tree: str) -> None:
    """Fill `tree`, which holds a layer, with all that `base` has besides it. Raises OSError, CalledProcessError."""
    names = set(os.listdir(tree))
    gone_names = {name for name in names if name.startswith(GONE) and _kind(os.path.join(tree, name)) == stat.S_IFREG}
    hidden = {name.removeprefix(GONE) for name in gone_names}
    untouched = [name for name in sorted(os.listdir(base)) if name not in names and name not in hidden]
    if untouched:
        sources = [os.path.join(base, name) for name in untouched]
        subprocess.run(["cp", "-a", "-t", tree, "--", *sources], check=True)
    for name in names:
        below, of_base = os.path.join(tree, name), os.path.join(base, name)
        if name in gone_names:
            os.remove(below)
        elif _kind(below) == _kind(of_base) == stat.S_IFDIR and name not in hidden:
            lay(of_base, below)


def peel(base: str, tree: str) -> None:
    """Leave in `tree` only its layer over `base`. What is no file, folder or link counts as gone. Raises OSError."""
    left = set()
    for name in os.listdir(tree):
        below, of_base = os.path.join(tree, name), os.path.join(base, name)
        kind = _kind(below)
        if kind not in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
            os.remove(below)
            continue
        left.add(name)
        if kind != _kind(of_base):
            continue
        if kind == stat.S_IFDIR:
            peel(of_base, below)
            if not os.listdir(below):
                os.rmdir(below)
        elif _is_same(below, of_base):
            os.remove(below)
    for name in os.listdir(base):
        if name not in left:
            with open(os.path.join(tree, GONE + name), "x"):
                pass


def _kind(path: str) -> int:
    """The type of what is at `path`, links not followed; 0 where nothing is."""
    try:
        return stat.S_IFMT(os.lstat(path).st_mode)
    except FileNotFoundError:
        return 0


def _is_same(path: str, other: str) -> bool:
    """Whether two files, or two links, say the same."""
    one, two = os.lstat(path), os.lstat(other)
    if stat.S_ISLNK(one.st_mode):
        return os.readlink(path) == os.readlink(other)
    if (one.st_mode, one.st_size) != (two.st_mode, two.st_size):
        return False
    with open(path, "rb") as this, open(other, "rb") as that:
        while chunk := this.read(CHUNK_BYTES):
            if chunk != that.read(CHUNK_BYTES):
                return False
    return True


if __name__ == "__main__":
    {"lay": lay, "peel": peel}[sys.argv[1]](*sys.argv[2:])
